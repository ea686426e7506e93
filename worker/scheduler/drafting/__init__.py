"""Drafts (speculative decoding): tokens that are proposed, and that no caller sees unless they are right."""
