"""Several models on one device, mocked together and served at one address."""
