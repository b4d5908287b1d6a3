"""Mocks of several models on one device, served at one address."""
