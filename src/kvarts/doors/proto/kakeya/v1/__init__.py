"""The established contract of session runtimes, version 1."""
