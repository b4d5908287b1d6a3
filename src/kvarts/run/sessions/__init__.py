"""Conversations with state on the server: new tokens in, generated tokens out, in bounded KV memory."""
