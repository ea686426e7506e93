"""Reads the configs of others: what most families have in common."""
