"""Attention whose keys and values stay latents."""
