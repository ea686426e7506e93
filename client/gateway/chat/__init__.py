"""Conversations: what messages and tools become in a prompt, and what an output becomes as a message.

`setup.ChatSetup` is made once a gateway; `reader.MessageReader` once a choice of an answer.
"""
