"""A forward pass as data, and what runs it."""
