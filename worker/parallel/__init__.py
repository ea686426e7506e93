"""Ranks talking to each other: named groups, collectives, the plan channel. The only place that names mpi4py."""
