"""What a report reads of the configuration of a run."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["RunConfig", "Slo"]


class Slo(Protocol):
    """What a request must keep to count as goodput: bounds in milliseconds, each optional."""

    @property
    def ttft_ms(self) -> float | None:
        """To its first token."""

    @property
    def tpot_ms(self) -> float | None:
        """Mean per output token after the first."""

    @property
    def e2e_ms(self) -> float | None:
        """To its last token."""


class RunConfig(Protocol):
    """What a report reads of the configuration of a run."""

    @property
    def num_pages(self) -> int:
        """Pages of each replica."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""

    @property
    def replicas(self) -> int:
        """Engines of this configuration."""

    @property
    def slo(self) -> Slo:
        """For goodput."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the configuration, JSON-able, by the names that a file and the command line use."""
