"""Doors for clients of OpenAI's API: real models, and a mock that behaves as one."""
