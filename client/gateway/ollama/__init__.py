"""Ollama's API: its requests become conversations and completions, their outputs lines of JSON."""
