"""Low-rank adapters: rows sorted by their adapters, and the two products of each."""
