"""What an engine did: timelines and journals."""
