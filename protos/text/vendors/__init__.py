"""Tokenizers and chat formats of model folders in their publishers' own files, without tokenizer.json or Jinja."""
