"""The values that a program and the engine exchange: sampling parameters, options, prompts, results, errors."""
