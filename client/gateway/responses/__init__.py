"""OpenAI's Responses: a request becomes a conversation, an output becomes items, and both can be kept for the next."""
