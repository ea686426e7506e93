"""The agent of a host, which runs commands for other hosts over mutual TLS, and its client, which behaves as ssh does.

Knows nothing of ranks, worlds or models.
"""
