"""Parts: features that act at the seams of the control plane, and which of them combine."""
