"""Text from tokens while they are generated: detokenizing, stop strings, completions."""
