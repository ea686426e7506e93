"""The placement of ranks: topology, GPUs, processors and memory."""
