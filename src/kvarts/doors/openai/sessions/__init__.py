"""Sessions over OpenAI's API, from the same store that gRPC serves."""
