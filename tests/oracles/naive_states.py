"""SGLang's tree and scheduler for a model with states (Mamba, linear attention), which have a pool of slots.

Each node has KV of all its tokens, and may have the state after its last one. A prefix is found if it ends with a node
that has a state, which is copied to a slot of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from oracles.naive_sglang import NaiveRadixTree, NaiveSglang, SglangLoad, SglangStep, _Node, _Req

__all__ = ["NaiveStateSglang", "NaiveStateTree"]


class _StateNode(_Node):
    children: Any
    parent: Any

    def __init__(self, parent: _StateNode | None, tokens: tuple[int, ...], time: float) -> None:
        super().__init__(parent, tokens, time)
        self.has_state = False
        self.num_state_locks = 0


class NaiveStateTree(NaiveRadixTree):
    """`recent` has the nodes with a state, the most recent first."""

    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load.size, load.page_size)
        self.root = _StateNode(None, (), 0)
        self.num_slots_free = load.slots
        self.recent: list[_StateNode] = []

    def note(self, step: SglangStep) -> None:
        step.slots_free = self.num_slots_free
        step.slots_evictable = sum(not node.num_state_locks for node in self.recent)

    def match(self, tokens: Sequence[int]) -> Any:
        """Return the last node of the path that has a state. It and its path are recent, and the state as well."""
        tokens, at = self.whole(tokens), 0
        node: Any = self.root
        best = self.root
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                break
            node, at = child, at + length
            if length < len(child.tokens):
                self._split(child, length)  # the state is that of the lower part
                break
            if node.has_state:
                best = node
        self.full_hit = at
        self.touch(best)
        time, above = float(self.now()), best
        while above.parent is not None:
            above.time = time
            time, above = time - 1e-5, above.parent
        return best

    def touch(self, node: Any) -> None:
        if node.has_state:
            self.recent.remove(node)
            self.recent.insert(0, node)

    def give_state(self, node: Any) -> bool:
        """Let a node have a state, unless it has one: return False then. It is recent in both cases."""
        had = node.has_state
        if had:
            self.touch(node)
        else:
            node.has_state = True
            self.recent.insert(0, node)
        node.time = self.now()
        return not had

    def lock(self, node: Any, change: int, owner: _Req | None = None) -> None:
        super().lock(node, change)
        node.num_state_locks += change

    def take_slots(self, count: int) -> None:
        """Take slots; as long as they lack, the least recent state goes, and its node if it is a leaf."""
        while self.num_slots_free < count:
            oldest = next((node for node in reversed(self.recent) if not node.num_state_locks), None)
            assert oldest is not None, "SGLang's server stops"
            if oldest.num_locks or oldest.children:
                self.drop_state(oldest)
            else:
                self.remove(oldest)
        self.num_slots_free -= count

    def drop_state(self, node: _StateNode) -> None:
        node.has_state = False
        self.recent.remove(node)
        self.num_slots_free += 1

    def remove(self, node: Any) -> None:
        if node.has_state:
            self.drop_state(node)
        super().remove(node)


class NaiveStateSglang(NaiveSglang):
    tree: NaiveStateTree

    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load)
        self.tree = NaiveStateTree(load)
        self.num_buffers = (2 if load.overlap else 1) * load.buffers
        self.grid = max(load.state_chunk, load.page_size)
        self.interval = lcm(self.grid, load.track_interval)

    def claim(self, request: _Req, node: Any) -> None:
        """Take a slot for the state that a request has found, before it is known whether it is admitted."""
        if node.parent is not None:
            self.tree.lock(node, 1)
            self.tree.take_slots(1)
            self.tree.lock(node, -1)
            request.num_slots = 1

    def disclaim(self, request: _Req) -> None:
        self.tree.num_slots_free += request.num_slots
        request.num_slots = 0

    def compute(self, batch: list[_Req]) -> None:
        num_each = 1 + self.num_buffers
        self.tree.take_slots(sum(num_each - each.num_slots for each in batch))
        for each in batch:
            each.num_slots = num_each
            self.track_prompt(each)
        super().compute(batch)

    def track_prompt(self, request: _Req) -> None:
        """Note where the state is kept: at the last multiple of the grid, or where others have left the prefix."""
        start, grid = request.start, self.grid
        end = start + (request.end - start) // grid * grid
        if end > start:
            branch = request.branch // grid * grid
            is_reached = max(start, request.found) < branch <= end and (branch - start) % grid == 0
            request.tracked = branch if is_reached else end

    def take(self, done: tuple[str, list[_Req], _Req | None]) -> None:
        if done[0] == "decode":
            for each in done[1]:
                length = len(each.ask.prompt) + each.num_out
                if not (each.is_over or each.is_retracted) and length % self.interval == 0:
                    each.tracked = length
        super().take(done)

    def insert(self, request: _Req, end: int) -> None:
        is_over = request.num_out == len(request.ask.output)
        if self.load.buffers:
            end, request.tracked = request.tracked, 0
        tokens = self.tree.whole(request.known[:end])
        request.start = request.end
        if not tokens:
            return
        if not is_over:
            self.tree.take_slots(1)
            request.num_slots += 1
        node = self.tree.insert(tokens, request.num_shared)
        request.num_slots -= 1
        self.tree.num_slots_free += not self.tree.give_state(node)
        self.tree.lock(request.node, -1, request)
        self.tree.lock(node, 1, request)
        request.node, request.num_shared = node, len(tokens)

    def release(self, request: _Req) -> None:
        self.disclaim(request)
        super().release(request)
