"""The public gRPC service, its messages, errors, health and reflection."""
