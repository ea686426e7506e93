"""A rank's gRPC service: the inbox for payloads, control, status and one output stream per client."""
