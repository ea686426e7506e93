"""Benchmarks that drive a cluster through the facade."""
