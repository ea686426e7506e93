"""The GPU as a device: step inputs, CUDA graphs, warm-up, streams, sampling, collectives."""
