"""What client and worker share: the wire, sampling parameters, errors, results, text handling, model folders.

Knows nothing of torch, MPI or grpc services; imports only light libraries, so that a client installs without the
engine.
"""
