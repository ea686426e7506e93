"""The running rows of a rank: their tokens, pages and payloads, and what a step reads of them."""
