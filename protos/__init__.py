"""The code that client and worker share: messages, sampling parameters, errors, results, text handling, model folders.

Knows nothing of torch, MPI or grpc services; imports only light libraries, so that a client installs without the
engine.
"""
