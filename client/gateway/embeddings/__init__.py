"""Embeddings, scores and reranking: requests whose results are vectors."""
