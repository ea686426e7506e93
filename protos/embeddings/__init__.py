"""Embeddings and scores: what a model's files say of them, and what engines and the gateway make of its vectors."""
