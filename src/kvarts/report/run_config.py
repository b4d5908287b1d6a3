"""The part of a run's configuration that a report reads."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["RunConfig", "SloBounds"]


class SloBounds(Protocol):
    """Bounds in milliseconds that a request must keep to count as goodput, each optional."""

    @property
    def ttft_ms(self) -> float | None:
        """Bound of the time to the first token."""

    @property
    def tpot_ms(self) -> float | None:
        """Bound of the mean time per output token after the first."""

    @property
    def e2e_ms(self) -> float | None:
        """Bound of the time to the last token."""


class RunConfig(Protocol):
    """The part of a run's configuration that a report reads."""

    @property
    def num_pages(self) -> int:
        """Pages of each replica."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def replicas(self) -> int:
        """Number of engines with this configuration."""

    @property
    def slo(self) -> SloBounds:
        """Bounds for goodput."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the configuration, JSON-able, by the names that a file and the command line use."""
