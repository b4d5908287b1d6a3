"""The loop of a replay of several models on identical devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.report.requests import FAILED
from kvarts.request import Request
from kvarts.sched.policy import NEVER_NS
from kvarts.sharing.turns import TurnLoop
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver

__all__ = ["SharedDriver"]


class SharedDriver(Driver):
    """A Driver of devices on which requests may also fail: because a model dies, or admits none until the end."""

    def __init__(
        self,
        arrivals: Sequence[Arrivals],
        devices: Sequence[TurnLoop],
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> None:
        super().__init__(arrivals, devices, on_progress=on_progress)
        self._devices = devices

    def _run_alone(self, index: int, until_ns: int) -> None:
        super()._run_alone(index, until_ns)
        self._fail(index, self._devices[index].now_ns)

    def _end(self, index: int, finished: list[Request]) -> None:
        super()._end(index, finished)
        self._fail(index, self._devices[index].now_ns)

    def _fail(self, index: int, now_ns: int) -> None:
        for request, reason in self._devices[index].take_failed():
            of_model, row, _ = self._in_engines.pop(request)
            of_model.log.reject(request, row, index, reason, FAILED)
            of_model.source.done(row, max(now_ns, request.arrival_ns))
            self._tell(1)

    def _settle(self) -> None:
        """Fail the requests of models that are still degraded, then those that arrive as a consequence."""
        now_ns = max(device.now_ns for device in self._devices)
        while self._in_engines:
            for index, device in enumerate(self._devices):
                device.give_up()
                self._fail(index, now_ns)
            while (arrival_ns := self._look_ahead()) != NEVER_NS:
                self._arrive(arrival_ns)
