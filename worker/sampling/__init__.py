"""From logits to tokens. Knows rows and their parameters, and nothing of requests, pages or the wire."""
