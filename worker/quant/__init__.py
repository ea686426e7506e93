"""How linear layers hold their weights: one file a scheme, one row in the table. Knows no model."""
