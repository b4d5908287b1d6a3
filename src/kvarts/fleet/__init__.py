"""Fleets: workers in pools, prompts that are computed on one and continued on another."""
