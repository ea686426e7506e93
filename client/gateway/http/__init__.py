"""HTTP plumbing: the application, errors, access, connections, bodies, event streams."""
