"""From tokens to text while they are generated: detokenizing, stop strings, completions."""
