"""How much memory, which policy, how many replicas: cache curves of all sizes, and replays at chosen points."""
