"""The facade (`ClientEngine`), the gateway, and benchmarks that drive a server. Never torch, never `worker`."""
