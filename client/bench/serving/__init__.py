"""Benchmarks of a server under load."""
