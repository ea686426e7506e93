"""Structured output: what the gateway, which checks a grammar, and the ranks, which apply it, must do alike."""
