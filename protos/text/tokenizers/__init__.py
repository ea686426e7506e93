"""Tokenizers of Hugging Face folders and GGUF files. Never imports torch."""
