"""The established contract of session runtimes, package `kakeya.v1`."""
