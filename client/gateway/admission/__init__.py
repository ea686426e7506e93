"""From a request to running generations: encode, validate, admit, follow."""
