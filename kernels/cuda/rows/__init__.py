"""Row-wise ops: normalisation, gated activations, embedding, rotary embedding with the append to the KV cache."""
