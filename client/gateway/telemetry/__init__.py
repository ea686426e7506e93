"""The records of each request: times, traces, log lines."""
