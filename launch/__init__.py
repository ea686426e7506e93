"""The command line, topology and placement, the mpirun command, the supervisor, preflight checks and model fetch."""
