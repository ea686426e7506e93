"""The metrics of /metrics and how they are collected."""
