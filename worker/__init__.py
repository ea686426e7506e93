"""A rank: service, step loop, scheduler, caches, models, weights, quantisation, parallelism, sampling.

Knows kernels and protos; never the client, the gateway or the launcher (which starts it as a process).
"""
