"""The models of one server, by the names that requests use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from kvarts.errors import ConfigError
from kvarts.limits import brief
from kvarts.openai_api.budget import MOST_VALUES, Budget
from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.served import Served

__all__ = ["Models"]


class Models:
    """One Served, or several on one device.

    The first one answers requests without a model. Raises ConfigError if two of them have the same name.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = tuple(served)
        self.first = self._served[0]
        names = [name for each in served for name in (*each.names, *each.adapters)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{name!r} is the name of two models", field="served_model_name")

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    def of(self, model: str | None) -> Served:
        """Return the Served with the name or the adapter `model`. Raise ApiError for another name."""
        if model is None:
            return self.first
        for served in self._served:
            if model in served.names or model in served.adapters:
                return served
        there_are = ", ".join(repr(served.names[0]) for served in self._served)
        raise ApiError(404, f"the model {brief(model)} does not exist; there is {there_are}", param="model")

    def by_own_name(self, name: str) -> Served:
        """Return the model whose first name is `name`. Raise ApiError for another name."""
        for served in self._served:
            if served.names[0] == name:
                return served
        raise ApiError(404, f"there is no model {brief(name)}", param=name)

    def budget(self) -> Budget:
        """Return the budget of one request: prompt tokens for a context twice, and sequences for all places."""
        if len(self._served) == 1:
            served = self.first
            return Budget(values=max(MOST_VALUES, 2 * served.limits.max_model_len), sequences=served.max_live)
        return Budget(
            values=max(MOST_VALUES, 2 * max(served.limits.max_model_len for served in self._served)),
            sequences=max(served.max_live for served in self._served),
        )

    # All of them ------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests in the engines, running or waiting."""
        return sum(served.num_live for served in self._served)

    @property
    def is_alive(self) -> bool:
        """Whether any model is alive."""
        return any(served.is_alive for served in self._served)

    @property
    def most_late_ns(self) -> int:
        """The largest delay of a mock's step; 0 for real models."""
        return max(getattr(served.host.clock, "most_late_ns", 0) for served in self._served)

    def open(self) -> None:
        """Accept requests from the running event loop."""
        for served in self._served:
            served.open()

    def set_starting(self, *, is_starting: bool) -> None:
        """Set whether the server is still starting, and therefore refuses requests."""
        for served in self._served:
            served.is_starting = is_starting

    def leave(self) -> None:
        """Report a shutdown at /health; requests are still accepted."""
        for served in self._served:
            served.is_leaving = True

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all requests have ended; return whether they did in time."""
        return all(await asyncio.gather(*(served.drained(timeout_s) for served in self._served)))

    def fail_transfers(self, fails: Callable[[int], bool] | None) -> None:
        """Set which transfers fail from now on, in each model with tiers. Raise ConfigError without tiers."""
        with_tiers = [served for served in self._served if served.host.core.tiers is not None]
        for served in with_tiers or self._served:
            served.fail_transfers(fails)

    def abort_all(self) -> None:
        """End all requests under way."""
        for served in self._served:
            served.abort_all()

    async def close(self) -> None:
        """Write durable state of sessions, after all requests have ended."""
        for served in self._served:
            if served.sessions is not None:
                await served.sessions.close()
