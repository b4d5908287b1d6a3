"""Tiers below the device: what they hold, what is stored there and when, and the transfers to and from them."""
