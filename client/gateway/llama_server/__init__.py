"""llama-server's own API: a request becomes a completion."""
