"""The facade (`ClientEngine`), results, the gateway, and benchmarks that drive a server. Never torch, never `worker`."""
