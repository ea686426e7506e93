"""Attention over paged KV: decode, prefill, cascade, and the merging of their parts."""
