"""OpenAI's completions and chat completions: request schemas, responses."""
