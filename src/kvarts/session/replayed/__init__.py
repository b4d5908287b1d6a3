"""Sessions of a trace in a replay: what engines keep of them between turns."""
