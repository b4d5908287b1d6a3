"""Transfers that begin while their prompt is computed: each layer of a step is sent once it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import ceil
from typing import NamedTuple, TypeAlias, cast

from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.tiers.links import LinkTransfer, SharedLinks, slower_of
from kvarts.core.tiers.rates import Job
from kvarts.sim.fleet.handoff import Computed, Handoff

__all__ = ["LayerWise", "LayerWiseLinks", "SharedLayerWise", "layers_of"]

NS_PER_S = 1_000_000_000


class _Part(NamedTuple):
    """The KV of a layer: `num_bytes` that can be sent from `ready_ns` on."""

    ready_ns: int
    num_bytes: int


def layers_of(computed: Computed, num_layers: int) -> list[_Part]:
    """Return the layers of a step, which are computed one after the other in equal times."""
    duration_ns, num_bytes = computed.end_ns - computed.start_ns, computed.num_bytes
    if not duration_ns:
        return [_Part(computed.end_ns, num_bytes)]
    return [
        _Part(
            computed.start_ns + duration_ns * layer // num_layers,
            num_bytes * layer // num_layers - num_bytes * (layer - 1) // num_layers,
        )
        for layer in range(1, num_layers + 1)
    ]


class _Stream:
    """A transfer at a rate of its own. Times are in units of a link, see LayerWise.

    `from_time`: when it begins with `parts`, each with the time at which it is ready and its duration. `num_left`:
    bytes that are not computed yet.
    """

    __slots__ = ("from_time", "handoff", "num_left", "number", "parts")

    def __init__(self, handoff: Handoff, number: int, num_left: int, from_time: int) -> None:
        self.handoff = handoff
        self.number = number
        self.num_left = num_left
        self.from_time = from_time
        self.parts: list[tuple[int, Fraction]] = []

    def end_time(self) -> Fraction:
        """Return when the last part has arrived."""
        time = Fraction(self.from_time)
        for ready, duration in self.parts:
            time = max(time, Fraction(ready)) + duration
        return time

    def change_rate(self, now: int, slowdown: Fraction) -> None:
        """Let all parts not sent by `now` take `slowdown` times their time."""
        time = Fraction(self.from_time)
        left: list[tuple[int, Fraction]] = []
        for ready, duration in self.parts:
            start = max(time, Fraction(ready))
            time = start + duration
            if time > now:
                left.append((max(ready, now), (time - max(start, Fraction(now))) * slowdown))
        self.from_time, self.parts = now, left


class LayerWise:
    """Links on which each transfer runs at `bytes_per_s`, independent of the others, plus `latency_ns`.

    Times are exact: in units of a nanosecond divided by the numerator of the rate.
    """

    def __init__(self, bytes_per_s: float, latency_ns: int, num_layers: int) -> None:
        rate = Fraction(bytes_per_s)
        self._unit = rate.numerator
        self._byte_time = NS_PER_S * rate.denominator
        self._latency = latency_ns * rate.numerator
        self._num_layers = num_layers
        self._streams: dict[Handoff, _Stream] = {}
        self._num_begun = 0
        self._ends: list[tuple[int, int, Handoff]] = []
        """Ends of the transfers of prompts that are computed, or are in the step under way."""
        self._factors: dict[int, int] = {}

    def begin(self, carried: LinkTransfer, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return False: it takes time."""
        handoff = cast(Handoff, carried)
        self._streams[handoff] = _Stream(handoff, self._num_begun, num_bytes, now_ns * self._unit)
        self._num_begun += 1
        for computed in handoff.computed or (Computed(now_ns, now_ns, num_bytes),):
            self.supply(handoff, computed)
        return False

    def supply(self, handoff: Handoff, computed: Computed) -> None:
        """Send a further part of a transfer under way."""
        stream = self._streams[handoff]
        byte_time = self._byte_time * slower_of(self._factors, handoff)
        stream.parts += [
            (part.ready_ns * self._unit, Fraction(part.num_bytes * byte_time))
            for part in layers_of(computed, self._num_layers)
        ]
        stream.num_left -= computed.num_bytes
        if not stream.num_left:
            stream.parts.append((0, Fraction(self._latency * slower_of(self._factors, handoff))))
            self._expect(stream)

    def cancel(self, carried: LinkTransfer, now_ns: int) -> None:
        """Abort a transfer that is under way."""
        handoff = cast(Handoff, carried)
        if self._streams.pop(handoff, None) is not None:
            self._ends = [each for each in self._ends if each[2] is not handoff]
            heapify(self._ends)

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make the rest of each transfer of `worker` take `factor` times its usual time."""
        before = {handoff: slower_of(self._factors, handoff) for handoff in self._streams}
        self._factors[worker] = factor
        self._ends = []
        for handoff, stream in self._streams.items():
            stream.change_rate(now_ns * self._unit, Fraction(slower_of(self._factors, handoff), before[handoff]))
            if not stream.num_left:
                self._expect(stream)

    def under_way(self) -> list[LinkTransfer]:
        """Return the transfers under way."""
        return list(self._streams)

    def next_ns(self) -> int:
        """Return when the next transfer ends, as far as it is known."""
        return self._ends[0][0] if self._ends else NEVER_NS

    def take_ended(self, now_ns: int) -> list[LinkTransfer]:
        """Return the transfers that end now."""
        ended: list[LinkTransfer] = []
        while self._ends and self._ends[0][0] <= now_ns:
            handoff = heappop(self._ends)[2]
            del self._streams[handoff]
            ended.append(handoff)
        return ended

    def _expect(self, stream: _Stream) -> None:
        heappush(self._ends, (ceil(stream.end_time() / self._unit), stream.number, stream.handoff))


class _SharedStream:
    """A transfer that shares rates. `coming`: layers that are not computed yet. `num_left`: bytes after these.

    `job`: sends the layers that are computed; None while all of them are sent.
    """

    __slots__ = ("coming", "job", "num_left", "number")

    def __init__(self, number: int, num_left: int) -> None:
        self.number = number
        self.num_left = num_left
        self.coming: deque[_Part] = deque()
        self.job: Job | None = None


class SharedLayerWise(SharedLinks):
    """Links on which the transfers of a link share its rate, while they have anything to send."""

    def __init__(
        self, bytes_per_s: float, latency_ns: int, num_layers: int, link_of: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(bytes_per_s, latency_ns, link_of)
        self._num_layers = num_layers
        self._streams: dict[Handoff, _SharedStream] = {}
        self._num_begun = 0
        self._ready: list[tuple[int, int, Handoff]] = []
        """When the next layer of each transfer can be sent, if it is not computed yet; a heap."""

    def begin(self, carried: LinkTransfer, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return False: it takes time."""
        handoff = cast(Handoff, carried)
        self._streams[handoff] = _SharedStream(self._num_begun, num_bytes)
        self._num_begun += 1
        for computed in handoff.computed or (Computed(now_ns, now_ns, num_bytes),):
            self.supply(handoff, computed)
        self._send_ready(now_ns)
        return False

    def supply(self, handoff: Handoff, computed: Computed) -> None:
        """Send a further part of a transfer under way."""
        stream = self._streams[handoff]
        if not stream.coming:
            heappush(self._ready, (layers_of(computed, self._num_layers)[0].ready_ns, stream.number, handoff))
        stream.coming += layers_of(computed, self._num_layers)
        stream.num_left -= computed.num_bytes

    def cancel(self, carried: LinkTransfer, now_ns: int) -> None:
        """Abort a transfer that is under way; the others get its share of the rate from now on."""
        handoff = cast(Handoff, carried)
        stream = self._streams.pop(handoff, None)
        if stream is None:
            self._latency.cancel(handoff, now_ns)
            return
        self._ready = [each for each in self._ready if each[2] is not handoff]
        heapify(self._ready)
        if stream.job is not None:
            self._shared.advance(now_ns)
            self._shared.remove(stream.job)

    def under_way(self) -> list[LinkTransfer]:
        """Return the transfers under way."""
        return [*self._streams, *self._latency.under_way()]

    def next_ns(self) -> int:
        """Return when the next transfer ends or gets a further layer, if none begins before."""
        return min(super().next_ns(), self._ready[0][0] if self._ready else NEVER_NS)

    def take_ended(self, now_ns: int) -> list[LinkTransfer]:
        """Return the transfers that end now."""
        if now_ns < self.next_ns():
            return []
        ended: list[LinkTransfer] = []
        for job in self._shared.take_ended(now_ns):
            handoff = cast(Handoff, job.owner)
            stream = self._streams[handoff]
            stream.job = None
            if stream.num_left or stream.coming:
                continue
            del self._streams[handoff]
            if self._latency.begin(handoff, 0, now_ns):
                ended.append(handoff)
        self._send_ready(now_ns)
        return ended + self._latency.take_ended(now_ns)

    def _send_ready(self, now_ns: int) -> None:
        """Send the layers that are computed by now."""
        while self._ready and self._ready[0][0] <= now_ns:
            _, number, handoff = heappop(self._ready)
            stream = self._streams[handoff]
            num_bytes = 0
            while stream.coming and stream.coming[0].ready_ns <= now_ns:
                num_bytes += stream.coming.popleft().num_bytes
            if stream.coming:
                heappush(self._ready, (stream.coming[0].ready_ns, number, handoff))
            if stream.job is not None:
                self._shared.advance(now_ns)
                self._shared.add(stream.job, num_bytes)
            elif num_bytes:
                stream.job = self.job_of(handoff, num_bytes)
                self._shared.begin(stream.job, now_ns)


LayerWiseLinks: TypeAlias = "LayerWise | SharedLayerWise"
"""Links that carry parts of a prompt: `begin` sends the parts in `handoff.computed`, and `supply` a further one."""
