"""Fleets: pools of workers; one worker can compute a prompt and another continue it."""
