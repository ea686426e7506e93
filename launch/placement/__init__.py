"""Which rank runs where: topology, GPUs, processors, memory."""
