"""Naive, obviously right models that the fast ones are held against."""
