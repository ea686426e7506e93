"""The connection of a client to one rank: gRPC, or any other transport with one unary and one streaming call."""
