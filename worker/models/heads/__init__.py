"""Draft heads: layers that read states of a model and propose what follows."""
