"""Pages of keys and values: how many there are, who holds which, and (in kv.py alone) their tensors."""
