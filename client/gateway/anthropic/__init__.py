"""Anthropic's Messages: a request becomes a conversation, an output becomes blocks."""
