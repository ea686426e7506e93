"""Checkpoints as named, memory-mapped tensors of which a rank reads its slices. Knows no model and no ranks."""
