"""Worlds over several hosts: a keeper process on each host, and the supervisor's link to it."""
