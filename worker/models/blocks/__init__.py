"""The blocks that layers are made of: one file a block, which owns its weights, its ops, its cache and its metadata."""
