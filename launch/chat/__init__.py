"""Conversations and prompts in the terminal, on a cluster or at a server: what `allspan chat` and `generate` share."""
