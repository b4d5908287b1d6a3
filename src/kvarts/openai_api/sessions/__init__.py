"""Sessions over OpenAI's API: the store that is served over gRPC as well."""
