"""Running real models: the same control plane, a wall clock, and text in and out."""
