"""Matrix products with plain and quantised weights, from one row to whole prompts."""
