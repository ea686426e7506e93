"""KV pages: their layout and moves."""
