"""The worker front: the gRPC service `vllm.grpc.engine.VllmEngine`, by which the router SMG drives this server."""
