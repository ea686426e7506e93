"""Sampling on the GPU: logits processors, filters, draws and log-probabilities."""
