"""One model on one device: its engine, and whether it could step in its next turn."""

from __future__ import annotations

from array import array
from fractions import Fraction

from kvarts.engine import Engine
from kvarts.events import Blocked, LeapDone, Turns
from kvarts.executor.base import VirtualExecutor
from kvarts.request import Request
from kvarts.sharing.device import SharedDevice
from kvarts.sharing.memory import DevicePart

__all__ = ["Tenant"]


class Tenant:
    """One model of `device`, registered as `name`: its engine, behind a router if there are several devices.

    `share`: its part of the time of the device.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        executor: VirtualExecutor,
        device: SharedDevice,
        part: DevicePart,
        *,
        share: Fraction = Fraction(1),
    ) -> None:
        self.name = name
        self.engine = engine
        self.config = engine.config
        self.scheduler = engine.scheduler
        self.tiers = engine.tiers
        self.is_fresh = False
        """Whether a step, an arrival or the end of a transfer has happened since its tiers were last checked."""
        self._decode_ns = executor.decode_ns
        self.part = part
        self.cache = part.cache
        self._device = device
        self.share = share
        part.token_budget = engine.config.max_num_batched_tokens
        self.settled = array("q")
        """Releases of pages outside steps: the previous step, the time, and the pages still used."""
        self.step_ns = 10_000_000
        """Duration of its last step; before that, a guess."""

    def submit(self, request: Request, now_ns: int) -> str | None:
        """Queue `request` at `now_ns`; or return the reason why it can never run."""
        if self._device.health(self.name) == "dead":
            return "its model is dead"
        reason = self.engine.submit(request, now_ns)
        if reason is None:
            self.is_fresh = True
        return reason

    def cancel(self, request: Request, now_ns: int) -> None:
        """Drop `request` at `now_ns`, between turns; models that wait for memory try again."""
        num_released = self.cache.num_released
        self.engine.now_ns = max(self.engine.now_ns, now_ns)
        self.engine.cancel(request)
        self.is_fresh = True
        self._device.forget(self.name, request.index)
        if self.cache.num_released != num_released:
            self.settle(now_ns)
        self._device.retry_blocked()

    def settle(self, now_ns: int) -> None:
        """Record a release of pages at `now_ns`, between two steps."""
        self.settled.extend((self.scheduler.wheel.step - 1, now_ns, self.cache.num_used))

    @property
    def is_stalled(self) -> bool:
        """Whether a step could compute nothing until pages are released, a load ends, or admission is resumed."""
        scheduler = self.scheduler
        if scheduler.running.num_running or (self.tiers is not None and self._has_loaded):
            return False
        can_admit = scheduler.waiting.num_waiting and not scheduler.pages.is_draining
        # If no request runs, all places are taken by requests that wait for loads.
        return not (can_admit and scheduler.blocked is not Blocked.PAGES and scheduler.blocked is not Blocked.SEQS)

    @property
    def _has_loaded(self) -> bool:
        """Whether the load of a request has ended that does not run yet."""
        loads = self.scheduler.loads
        return loads is not None and bool(loads.loaded or loads.fronts or loads.has_ended or loads.tiers.has_loaded)

    @property
    def wants_tokens(self) -> bool:
        """Whether it could compute more than one token per decode."""
        scheduler = self.scheduler
        if scheduler.running.chunked or (self.tiers is not None and self._has_loaded):
            return True
        can_admit = scheduler.waiting.num_waiting and not scheduler.pages.is_draining
        return bool(can_admit) and scheduler.blocked in (Blocked.NOT, Blocked.BUDGET)

    def store(self, now_ns: int) -> None:
        """Begin the stores that are due at `now_ns`, between turns. There must be tiers."""
        loads = self.scheduler.loads
        assert loads is not None
        loads.take_ended()
        loads.tiers.begin_step(now_ns)
        loads.tiers.plan_stores(now_ns)

    def decode_ns(self, num_steps: int) -> list[int]:
        """Return the durations of the next `num_steps` steps if they are identical."""
        wheel, pool_tokens = self.scheduler.wheel, self.engine.config.pool_tokens
        return self._decode_ns(wheel.num_decoding, wheel.known_tokens, pool_tokens, num_steps)

    def leap(self, durations_ns: list[int], pages_taken: list[int], turns: Turns) -> None:
        """Start identical steps, each in its own turn, whose pages were already taken. `end_leap` must follow."""
        engine, scheduler = self.engine, self.scheduler
        assert engine.log.tell_details is None, "what happens in many turns at once is not told in detail"
        scheduler.advance(len(durations_ns), is_taken=True)
        if engine.log.tell is not None:
            engine.log.tell(
                LeapDone(
                    scheduler.wheel.step,
                    turns.starts_ns[0],
                    durations_ns,
                    pages_taken,
                    scheduler.cache.num_used - sum(pages_taken),
                    turns.cached[0],
                    scheduler.cache.num_released,
                    scheduler.running.num_running,
                    scheduler.num_waiting,
                    scheduler.blocked,
                    turns=turns,
                    num_loading=0 if scheduler.loads is None else scheduler.loads.num_waiting,
                )
            )
        engine.now_ns = turns.starts_ns[-1] + durations_ns[-1]

    def end_leap(self, num_steps: int) -> list[Request]:
        """End the `num_steps` steps that `leap` started; return the requests that finished."""
        finished = self.scheduler.commit_leap(num_steps, self.engine.now_ns)
        self.engine.emit()
        return finished
