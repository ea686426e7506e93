"""The way from a request to running generations: encode, validate, admit, follow."""
