"""KV events over ZeroMQ in vLLM's formats: which pages the prefix cache holds, for routers that follow it."""
