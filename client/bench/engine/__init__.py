"""Benchmarks of the engine: latency, ops, prefix cache, peers."""
