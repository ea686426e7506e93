"""The gateway: OpenAI HTTP and the public gRPC service before one engine.

It tokenises, applies the chat template and streams text; it must not know where the engine runs, how many ranks it has,
or what a tensor is.
"""
