"""API keys, callers and certificates."""
