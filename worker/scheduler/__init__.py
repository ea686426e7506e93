"""Decides, on the leader, what runs in each step. Pure Python over integers: no tensor, no MPI, no grpc."""
