"""Attention over latents: one row a token, of which every head makes its keys and values."""
