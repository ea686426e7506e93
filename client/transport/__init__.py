"""How the facade talks to one rank: gRPC, or anything else that can carry one unary and one streaming call."""
