"""Tiers below the device: their contents, store policies, and the transfers to and from them."""
