"""Conversations whose state stays on the server: new tokens in, generated tokens out, in bounded KV memory."""
