"""What is recorded of each request: times, traces, log lines."""
