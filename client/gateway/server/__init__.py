"""The HTTP port below the routes: accepting connections, their limits, and what the parser leaves to the server."""
