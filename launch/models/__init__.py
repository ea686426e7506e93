"""Finding, fetching, checking and converting models."""
