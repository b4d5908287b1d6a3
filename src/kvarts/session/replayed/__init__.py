"""Sessions of a trace in a replay, with the KV that engines keep between turns."""
