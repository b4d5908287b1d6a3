"""What a part of a device asks for pages that are in use, where no model gives any."""

from __future__ import annotations

from kvarts.request import Request

__all__ = ["NO_OTHERS"]


class NoOthers:
    """Nothing is reserved, and no running work makes way."""

    def kept_for_others(self, model: str) -> int:
        """Return 0."""
        return 0

    def make_way(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Return False."""
        return False


NO_OTHERS = NoOthers()
