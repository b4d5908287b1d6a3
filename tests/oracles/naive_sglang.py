"""SGLang's scheduler and radix cache, a step at a time and a token at a time: orders of the queue and of eviction.

Nothing here is fast: the tree keeps the tokens of its nodes, an eviction looks at all of them, and each step counts all
that run. It agrees with SGLang 0.5.23's own scheduler (`python -m equal.sglang`), of which `recorded_sglang.json` has
some steps.

A step is planned by `plan`, and its result is taken by `take`: at once, or with overlap after the next plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import msgspec

__all__ = ["Asked", "NaiveRadixTree", "NaiveSglang", "SglangLoad", "SglangStep", "naive_steps"]

MOST_PROMISED = 4096
"""The most tokens that an admission promises a request for its answer."""
RETRACT_STEPS = 20
"""The steps of decodes that a retraction makes room for."""
FEW_TOKENS = 32
"""Tokens of a hit up to which a request waits for one that is to compute as many tokens of the same prefix."""
REFRESH_EVERY, REFRESHED = 32, 128
"""Tries of a prefill between two touches of the prefixes of waiting requests, and the requests whose are touched."""


class Asked(msgspec.Struct, omit_defaults=True):
    """A request: the step before which it arrives, its prompt and its answer. The restatement knows no salts."""

    step: int
    prompt: list[int]
    output: list[int]
    priority: int = 0
    salt: str | None = None


class SglangLoad(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Requests in order of arrival, and the server that they meet. `size`: tokens of KV; `chunk`: of a prefill.

    `priorities`: requests wait in their order; with `preempts`, one that finds no place preempts those whose priority
    is lower by more than `threshold`. `retraction`: whom decodes retract first, by `length` or by `priority`.
    `recv_interval`: steps of decodes after which requests are received; a step of prompts counts as a thousand.
    `has_events`: steps have KV events, which the restatement has not. `host_ratio`: the size of host memory, as a
    multiple of the device's; 0 for none. What of it is written is decided by `write_policy`; a copy to the host, or to
    the device, takes so many steps. `prefetch_policy`: how long requests wait for storage below it, "" without any;
    `storage_config` has its thresholds. A query takes `query_steps`, and each batch of `batch_pages` pages that are
    read or written so many. `stored`: the requests whose prompts and answers are in storage at the start.
    `window`: tokens before a token that layers with sliding windows attend to, 0 without such layers; `window_ratio`:
    the size of the pool of their KV, as a part of the other one's. `slots`: the states that there is room for, 0 for a
    model without states. Prompts have states every `state_chunk` tokens, a page at least, and decodes every
    `track_interval` tokens, with `buffers`; without, where an insertion ends.
    """

    page_size: int
    size: int
    chunk: int
    max_running: int
    asks: list[Asked]
    max_prefill: int = 16_384
    overlap: bool = True
    ignore_eos: bool = True
    conservativeness: float = 1.0
    policy: str = "fcfs"
    eviction: str = "lru"
    eviction_config: dict[str, int] = {}
    priorities: bool = False
    lower_first: bool = False
    preempts: bool = True
    threshold: int = 10
    retraction: str = "length"
    recv_interval: int = 1
    has_events: bool = False
    host_ratio: float = 0.0
    write_policy: str = "write_through"
    d2h_steps: int = 1
    h2d_steps: int = 1
    prefetch_policy: str = ""
    storage_config: dict[str, int | float] = {}
    retry_interval: int = 8
    max_retries: int = 8
    query_steps: int = 1
    read_steps: int = 1
    write_steps: int = 1
    batch_pages: int = 128
    stored: list[int] = []
    window: int = 0
    window_ratio: float = 0.8
    slots: int = 0
    buffers: bool = True
    state_chunk: int = 64
    track_interval: int = 256

    @property
    def window_size(self) -> int:
        """The tokens of the pool of layers with sliding windows, as SGLang rounds them."""
        return int(self.size * self.window_ratio) // self.page_size * self.page_size


class SglangStep(msgspec.Struct, omit_defaults=True):
    """What one step did, and the memory after it, in tokens. `admitted`: the tokens that each admitted request hit.

    `loaded`: those of them that come from host memory; `fetched`: of these, those that came there from storage for this
    request. `stored`: the tokens in storage; `reserved`: those that prefetches may take room for. `window_free`,
    `window_evictable`: those of layers with sliding windows. `slots_free`, `slots_evictable`: room for states. `fails`:
    nothing runs, and what waits never begins; or the prompts of two requests are computed in part, and the first one is
    taken for computed.
    `events`: its KV events as a consumer decodes them.
    """

    kind: str | None = None
    tokens: dict[int, int] = {}
    admitted: dict[int, int] = {}
    retracted: list[int] = []
    ended: list[int] = []
    aborted: list[int] = []
    free: int = 0
    evictable: int = 0
    waiting: int = 0
    loaded: dict[int, int] = {}
    fetched: dict[int, int] = {}
    host_free: int = 0
    stored: int = 0
    reserved: int = 0
    window_free: int = 0
    window_evictable: int = 0
    slots_free: int = 0
    slots_evictable: int = 0
    fails: bool = False
    events: list[dict[str, Any]] = []


class _Node:
    def __init__(self, parent: Any, tokens: tuple[int, ...], time: float) -> None:
        self.parent, self.tokens, self.time = parent, tokens, time
        self.children: dict[tuple[int, ...], _Node] = {}
        self.num_locks = 0
        self.num_inserted = self.priority = self.longest = 0
        """Insertions, by different requests, their largest priority, and the longest path through it at any time."""

    def copy_to(self, upper: _Node) -> None:
        upper.num_locks, upper.num_inserted = self.num_locks, self.num_inserted
        upper.priority, upper.longest = self.priority, self.longest


def rank_of(node: _Node, eviction: str, config: dict[str, int]) -> int:
    """Return what is compared before the last touch: the lowest is evicted first."""
    if eviction == "lfu":
        return node.num_inserted
    if eviction == "slru":
        return int(node.num_inserted >= config.get("protected_threshold", 2))
    if eviction == "priority":
        return node.priority
    if eviction == "tlru":
        needed = node.longest + config.get("next_prompt_estimate", 0) - config.get("threshold", 0)
        return -int(length_of(node) - len(node.tokens) >= max(0, needed))
    return 0


class NaiveRadixTree:
    """Nodes of whole pages. `num_free` are the tokens of the pool that nothing has."""

    def __init__(
        self, size: int, page_size: int, eviction: str = "lru", eviction_config: dict[str, int] | None = None
    ) -> None:
        self.page_size, self.num_free, self.clock = page_size, size, 0
        self.num_host_free = self.num_stored = self.num_asked = 0
        self.num_free_of_windows: float = inf
        self.full_hit = 0
        """With windows, the length of what the last match would have found without them."""
        self.step = -1
        self.eviction, self.eviction_config = eviction, eviction_config or {}
        self.root = _Node(None, (), 0)

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def nodes(self) -> Iterator[_Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    @property
    def evictable(self) -> int:
        return sum(len(node.tokens) for node in self.nodes() if not node.num_locks)

    def _child(self, node: _Node, tokens: Sequence[int], start: int) -> tuple[Any, int]:
        """Return the child that goes on with `tokens`, and how many tokens of its own whole pages agree."""
        child = node.children.get(tuple(tokens[start : start + self.page_size]))
        if child is None:
            return None, 0
        length = 0
        while length < len(child.tokens) and start + length < len(tokens):
            if child.tokens[length] != tokens[start + length]:
                break
            length += 1
        return child, length // self.page_size * self.page_size

    def _split(self, node: Any, length: int) -> Any:
        """Split a node; return its upper part. Both are recent, the lower one most."""
        upper = type(node)(node.parent, node.tokens[:length], self.now())
        node.parent.children[node.tokens[: self.page_size]] = upper
        upper.children[node.tokens[length : length + self.page_size]] = node
        node.copy_to(upper)
        node.parent, node.tokens, node.time = upper, node.tokens[length:], self.now()
        return upper

    def whole(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[: len(tokens) // self.page_size * self.page_size]

    def match(self, tokens: Sequence[int]) -> Any:
        """Return the node that ends the longest prefix. The path is recent from now on, the lowest node most."""
        tokens, node, at = self.whole(tokens), self.root, 0
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                break
            node, at = child, at + length
            if length < len(child.tokens):
                node = self._split(child, length)
                break
        time, above = float(self.now()), node
        while above.parent is not None:
            above.time = time
            time, above = time - 1e-5, above.parent
        return node

    def insert(self, tokens: Sequence[int], own_from: int, num_inserted: int = 0, priority: int = 0) -> _Node:
        """Add whole pages, those from `own_from` on as the request's own; free those that the tree has already.

        `num_inserted`: tokens that the request inserted before.
        """
        tokens, node, at = self.whole(tokens), self.root, 0
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                new = type(self.root)(node, tuple(tokens[at:]), self.now())
                node.children[new.tokens[: self.page_size]] = new
                new.num_inserted, new.priority = 1, priority
                above = new
                while above is not self.root:
                    above.longest = max(above.longest, len(tokens))
                    above = above.parent
                return new
            child.time = self.now()
            node = self._split(child, length) if length < len(child.tokens) else child
            node.priority = max(node.priority, priority)
            node.num_inserted += at + length > num_inserted
            self.num_free += max(0, at + length - max(at, own_from))
            at += length
        return node

    # What only a tree above host memory does; see NaiveHostTree.

    def begin_step(self, waiting: list[_Req]) -> None:
        pass

    def ask_storage(self, request: _Req) -> None:
        pass

    def waits(self, request: _Req) -> bool:
        return False

    def has_lost(self, request: _Req) -> bool:
        return False

    def leave_queue(self, request: _Req) -> None:
        pass

    def start_writes(self) -> None:
        pass

    def start_loads(self) -> None:
        pass

    def on_device(self, node: _Node) -> _Node:
        return node

    def load_back(self, node: _Node) -> bool:
        return False

    # What only a tree with windows, or with states, does; see NaiveWindowTree and NaiveStateTree.

    def note(self, step: SglangStep) -> None:
        pass

    def take(self, num_tokens: int) -> None:
        """Take the memory of so many tokens."""
        self.num_free -= num_tokens
        assert self.num_free >= 0

    def lock(self, node: _Node, change: int, owner: _Req | None = None) -> None:
        while node.parent is not None:
            node.num_locks += change
            node = node.parent

    def make_room(self, num_tokens: int) -> None:
        """Evict whole leaves, the least recent first, until so many tokens are free, or nothing is left to evict."""
        while self.num_free < num_tokens:
            leaves = [node for node in self.nodes() if not (node.num_locks or node.children)]
            if not leaves:
                return
            self.remove(min(leaves, key=lambda node: (rank_of(node, self.eviction, self.eviction_config), node.time)))

    def remove(self, node: Any) -> None:
        self.num_free += len(node.tokens)
        del node.parent.children[node.tokens[: self.page_size]]


def length_of(node: _Node) -> int:
    """Return the tokens from the root to the end of `node`."""
    length = 0
    while node.parent is not None:
        length, node = length + len(node.tokens), node.parent
    return length


class _Req:
    def __init__(self, index: int, ask: Asked) -> None:
        self.index, self.ask = index, ask
        self.num_out = 0
        """Tokens of its answer whose results were taken."""
        self.node: Any = None
        self.is_over = self.is_retracted = False
        self.num_queued = self.num_slots = 0
        """How many had been queued when it was last; the slots that it has for its state."""
        self.seen = self.found = 0
        """The tokens that it knew when it was looked at last, and those of them that it found."""
        self.fetched = 0, 0
        """The tokens that came to host memory from storage for it last: from one of its tokens up to another."""
        self.begin(0)

    def begin(self, length: int) -> None:
        """Start from a hit of so many tokens: those are the tree's, up to `num_owned` in all have memory."""
        self.num_shared = self.num_owned = self.start = self.end = length
        self.num_inserted = self.num_slid = self.num_decodes = self.branch = self.tracked = 0
        """Tokens that it inserted; those whose window KV it has freed; its decodes; the prefix to be inserted first;
        and the tokens before a state that is inserted next."""

    @property
    def known(self) -> list[int]:
        return self.ask.prompt + self.ask.output[: self.num_out]

    @property
    def promise(self) -> int:
        return min(len(self.ask.output) - self.num_out, MOST_PROMISED)


class NaiveSglang:
    """The scheduler. Requests of a load are added with `add`; a step is `plan`, and `take` of its result."""

    def __init__(self, load: SglangLoad) -> None:
        self.load, self.page_size = load, load.page_size
        self.tree = NaiveRadixTree(load.size, load.page_size, load.eviction, load.eviction_config)
        self.first_ratio = min(0.7 * load.conservativeness, 1.0)
        self.least_ratio = min(self.first_ratio * 0.14, 1.0)
        self.ratio = self.first_ratio
        self.waiting: list[_Req] = []
        self.running: list[_Req] = []
        self.chunked: _Req | None = None
        self.is_full = False
        self.last: tuple[str, list[_Req], _Req | None] | None = None
        """The kind of the last step, its requests, and the one of them whose prefill goes on."""
        self.queued: tuple[str, list[_Req], _Req | None] | None = None
        """The step whose result was not taken yet."""
        self.num_tries = self.num_queued = 0
        self.sign = 1 if load.lower_first else -1
        self.step = SglangStep()
        if load.host_ratio:
            from oracles.naive_hicache import NaiveHostTree, NaiveStoredTree

            self.tree = NaiveStoredTree(load) if load.prefetch_policy else NaiveHostTree(load)

    def ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    # The plan ---------------------------------------------------------------------------------------------

    def run_step(self, arrived: list[_Req]) -> SglangStep:
        """Plan a step and take a result: its own, or with overlap that of the step before."""
        self.tree.step += 1
        self.queue(arrived)
        for each in arrived:
            self.tree.ask_storage(each)
        step = self.step = SglangStep()
        planned = self.plan()
        if planned is not None:
            step.kind = planned[0]
        before, self.queued = self.queued, planned
        if not self.load.overlap:
            before, self.queued = planned, None
        if before is not None:
            self.take(before)
            self.tree.start_writes()
        is_idle = planned is None and not (self.load.overlap and self.last)
        if is_idle and not (self.running or self.waiting) and self.chunked is None:
            self.ratio = self.first_ratio
        self.last = planned
        step.free, step.evictable, step.waiting = self.tree.num_free, self.tree.evictable, len(self.waiting)
        step.host_free = self.tree.num_host_free
        step.stored, step.reserved = self.tree.num_stored, self.tree.num_asked
        self.tree.note(step)
        is_waiting = bool(self.waiting) or self.chunked is not None
        step.fails |= self.load.window > 0 and is_idle and not self.running and is_waiting
        return step

    def queue(self, requests: list[_Req]) -> None:
        for each in requests:
            self.num_queued += 1
            each.num_queued = self.num_queued
            self.waiting.append(each)

    def plan(self) -> tuple[str, list[_Req], _Req | None] | None:
        self.tree.begin_step(self.waiting)
        if self.chunked is not None and self.chunked.end > self.chunked.start:
            self.insert(self.chunked, self.chunked.end)
        if self.last is not None and self.last[0] == "prefill":
            joining = [each for each in self.last[1] if each not in (self.chunked, self.last[2])]
            if any(each.is_over for each in joining) or len(joining) < len(self.last[1]) or not self.running:
                self.is_full = False
            self.running += [each for each in joining if not each.is_over]
        self.leave([each for each in self.running if each.is_over])
        batch = self.prefill()
        if batch:
            return "prefill", batch, self.chunked
        return self.decode()

    def leave(self, requests: list[_Req]) -> None:
        if requests:
            self.is_full = False
            self.running = [each for each in self.running if each not in requests]

    def prefill(self) -> list[_Req]:
        load, tree, page = self.load, self.tree, self.page_size
        preempts = load.priorities and load.preempts
        if not self.running or preempts or load.window:
            self.is_full = False
        if (self.is_full or not self.waiting) and self.chunked is None:
            return []
        if self.num_rows() >= load.max_running and self.chunked is None and not preempts:
            self.is_full = True
            return []
        if load.priorities:
            self.waiting.sort(key=lambda each: (each.ask.priority * self.sign, each.num_queued))
        if self.load.policy == "lpm" and len(self.waiting) <= REFRESHED:
            self.sort_by_prefix()
        elif self.load.policy == "dfs-weight":
            self.sort_depth_first()
        elif self.waiting and load.eviction == "lru":
            if self.num_tries % REFRESH_EVERY == 0:
                for each in reversed(self.waiting[:REFRESHED]):
                    tree.match(each.known)
            self.num_tries += 1
        ratio = 1.0 if load.ignore_eos else self.ratio
        promised: float = sum(each.promise * ratio for each in self.running)
        taken = self.promised_windows = 0
        left, left_input = load.chunk, load.max_prefill
        batch: list[_Req] = []

        def room() -> float:
            return tree.num_free + tree.evictable - promised

        def charge(request: _Req, num_tokens: int, num_new: int) -> None:
            nonlocal promised, taken, left, left_input
            request.end = request.start + num_tokens
            batch.append(request)
            self.promise_windows(self.ceil(num_tokens), num_new, left)
            promised += self.ceil(num_tokens) + page + num_new
            taken += self.ceil(num_tokens) + page
            left -= self.ceil(num_tokens)
            left_input -= self.ceil(num_tokens)

        if self.chunked is not None:
            request = self.chunked
            most = self.most_of_chunk(left, room())
            rest = len(request.known) - request.start
            if rest <= most:
                self.chunked = None
            if most > 0:
                charge(request, min(rest, most), min(len(request.ask.output), MOST_PROMISED) if rest <= most else 0)

        def promise_of(request: _Req) -> float:
            return request.promise * ratio

        def preempt(request: _Req) -> bool:
            """Preempt running requests that are far less important, if these have what the new one lacks."""
            nonlocal promised
            candidates = sorted(self.running, key=lambda each: (-self.sign * each.ask.priority, -each.num_queued))
            lacking = request.seen - request.found + min(len(request.ask.output), MOST_PROMISED) - room()
            chosen: list[_Req] = []
            for each in candidates:
                if (request.ask.priority - each.ask.priority) * -self.sign <= load.threshold:
                    break
                chosen.append(each)
                lacking -= promise_of(each)
                if lacking <= 0:
                    break
            if not chosen or lacking > 0:
                return False
            num_left = len(self.running)
            for each in self.running:
                if each in chosen:
                    num_left -= 1
                    promised -= promise_of(each)
                    self.send_back(each, num_left)
            self.running = [each for each in self.running if each not in chosen]
            preempted.extend(chosen)
            return True

        chunked = None
        preempted: list[_Req] = []
        num_held = len(batch)
        for request in self.waiting:
            has_room = room() > 0 and tree.num_free + tree.evictable > taken and self.room_of_windows() > 0
            if has_room and (left_input <= 0 or left <= 0):
                break
            num_rows = load.max_running - self.num_rows()
            most_new = min(load.max_running - len(self.running), num_rows + num_held)
            if len(batch) >= most_new:
                self.is_full = True
            if self.is_full and not (preempts and preempt(request)):
                break
            if tree.waits(request):
                continue
            best = tree.match(request.known[:-1])
            num_of_branch = tree.full_hit
            if tree.has_lost(request):
                continue
            self.claim(request, best)
            node = tree.on_device(best)
            length = length_of(node)
            num_below = length_of(best) - length
            request.seen, request.found = len(request.known), length
            tree.lock(node, 1, request)
            rest = len(request.known) - length
            limit = self.most_of_prompt(self.ceil(rest), request.promise, left)
            if rest + request.promise + page >= room() or limit is None:
                tree.lock(node, -1, request)
                self.is_full = bool(batch or self.running)
                break
            if left < page:
                tree.lock(node, -1, request)
                break
            if num_below:
                if tree.load_back(best):
                    tree.lock(best, 1, request)
                    tree.lock(node, -1, request)
                    node, length, rest = best, length + num_below, rest - num_below
                    self.step.loaded[request.index] = num_below
                    first, last = request.fetched
                    if (num_fetched := min(length, last) - max(length - num_below, first)) > 0:
                        self.step.fetched[request.index] = num_fetched
                elif rest + request.promise + page >= room():
                    tree.lock(node, -1, request)
                    self.is_full = bool(batch or self.running)
                    break
            num_tokens, num_new = rest, min(len(request.ask.output), MOST_PROMISED)
            if self.ceil(rest) > limit:
                num_tokens, num_new = limit // page * page, 0
                self.step.fails = chunked is not None or self.chunked is not None
                chunked = request
            request.begin(length)
            request.branch = num_of_branch
            request.node = node
            tree.leave_queue(request)
            self.step.admitted[request.index] = length
            charge(request, num_tokens, num_new)
            if not (room() > 0 and tree.num_free + tree.evictable > taken and self.room_of_windows() > 0):
                self.is_full = True
                break
            if left_input <= 0 or left <= 0:
                break
        self.waiting = [each for each in self.waiting if each not in batch]
        for each in self.waiting:
            self.disclaim(each)
        self.queue(preempted)
        self.step.retracted += [each.index for each in preempted]
        if chunked is not None:
            self.chunked = chunked
        if batch:
            self.compute(batch)
        return batch

    def sort_by_prefix(self) -> None:
        """Sort the queue by what it finds, the longest first; last come those who wait for the prefix of another."""
        prompts = NaiveRadixTree(0, 1)
        keys: dict[_Req, float] = {}
        for each in self.waiting:
            node = self.tree.match(each.known)
            keys[each] = -min(length_of(node), len(each.known) - 1)
            if length_of(self.tree.on_device(node)) <= FEW_TOKENS:
                if length_of(prompts.match(each.known)) >= FEW_TOKENS:
                    keys[each] = float("inf")
                else:
                    prompts.insert(each.known, 0)
        self.waiting.sort(key=keys.__getitem__)

    def sort_depth_first(self) -> None:
        """Sort the queue by a walk through the tree: most sought children first, and requests after all children."""
        ends = [(self.tree.match(each.known), each) for each in self.waiting]

        def num_seeking(node: _Node) -> int:
            return sum(end is node for end, _ in ends) + sum(map(num_seeking, node.children.values()))

        def walk(node: _Node) -> Iterator[_Req]:
            for child in sorted(node.children.values(), key=num_seeking, reverse=True):
                yield from walk(child)
            yield from (each for end, each in ends if end is node)

        self.waiting = list(walk(self.tree.root))

    # What only a scheduler of a model with windows, or with states, does; see NaiveWindowSglang, NaiveStateSglang.

    def claim(self, request: _Req, node: Any) -> None:
        pass

    def disclaim(self, request: _Req) -> None:
        pass

    def room_of_windows(self) -> float:
        return inf

    def promise_windows(self, num_tokens: int, num_new: int, left: int) -> None:
        """Promise the memory of the windows of an admitted prompt, of which a step computes `left` at most."""

    def most_of_prompt(self, rest: int, num_new: int, left: int) -> int | None:
        """Return how much of a prompt that lacks `rest` tokens this step may compute; None: it does not begin."""
        return left

    def most_of_chunk(self, left: int, room: float) -> int:
        """Return how much of a prompt that goes on this step may compute."""
        most = min(left, int(room))
        return most if most > 0 else left

    def slide_windows(self) -> None:
        pass

    def num_rows(self) -> int:
        """Return how many requests hold memory: also those whose last result was not taken yet."""
        holders = {each.index for each in self.running}
        if self.chunked is not None:
            holders.add(self.chunked.index)
        if self.queued is not None:
            holders |= {each.index for each in self.queued[1] if each.node is not None}
        return len(holders)

    def compute(self, batch: list[_Req]) -> None:
        """Take the memory of a prefill: more is evicted than is needed, a page for each request if pages are larger."""
        num_tokens = sum(each.end - each.start for each in batch)
        self.tree.start_loads()
        self.tree.make_room(num_tokens + (len(batch) * self.page_size if self.page_size > 1 else 0))
        for each in batch:
            self.tree.take(self.ceil(each.end) - self.ceil(each.start))
            each.num_owned = each.end
            each.is_retracted = False
            self.step.tokens[each.index] = each.end - each.start

    def decode(self) -> tuple[str, list[_Req], _Req | None] | None:
        ending: list[_Req] = []
        if self.load.overlap and self.queued is not None:
            ending = [each for each in self.running if each in self.queued[1]]
            ending = [each for each in ending if each.num_out + 1 >= len(each.ask.output)]
        num_before = len(self.running)
        self.running = [each for each in self.running if each not in ending]
        if not self.running:
            self.is_full = False
            return None
        if not self.has_memory(self.running):
            if ending:
                self.is_full = False
                return None
            self.retract()
        else:
            decay = (self.first_ratio - self.least_ratio) / 600
            self.ratio = max(self.ratio - decay, self.least_ratio)
        if len(self.running) < num_before:
            self.is_full = False
        if not self.running:
            return None
        page = self.page_size
        self.slide_windows()
        self.tree.make_room(len(self.running) * page)
        for each in self.running:
            self.tree.take(0 if each.num_owned % page else page)
            each.num_owned += 1
            self.step.tokens[each.index] = 1
        return "decode", list(self.running), None

    def has_memory(self, requests: list[_Req]) -> bool:
        num_tokens = sum(each.num_owned % self.page_size == 0 for each in requests) * self.page_size
        self.tree.make_room(num_tokens)
        return self.tree.num_free >= num_tokens and self.tree.num_free_of_windows >= num_tokens

    def retract(self) -> None:
        """Retract until the rest fits: those with the fewest tokens generated, of the longest prompts, first."""

        def keeping(each: _Req) -> tuple[int, int, int]:
            priority = -self.sign * each.ask.priority if self.load.retraction == "priority" else 0
            return priority, each.num_out, -len(each.ask.prompt)

        kept = sorted(self.running, key=keeping, reverse=True)
        is_first, retracted = True, []
        while (is_first or not self.has_memory(kept)) and len(kept) > 1:
            is_first = False
            request = kept.pop()
            self.send_back(request, len(kept))
            self.step.retracted.append(request.index)
            self.queue([request])
            retracted.append(request)
        if len(kept) == 1 and not self.has_memory(kept):
            last = kept.pop()
            self.release(last)
            last.is_over = True
            self.step.aborted.append(last.index)
        self.running = kept
        num_asked = sum(len(each.ask.output) for each in kept)
        self.ratio = min(1.0, (sum(each.num_out for each in kept) + RETRACT_STEPS * len(kept)) / (num_asked + 1))
        for request in retracted:
            self.tree.ask_storage(request)

    def send_back(self, request: _Req, num_left: int) -> None:
        """Free what a running request has, and make room for some steps of those that are left."""
        self.release(request)
        self.tree.make_room(num_left * RETRACT_STEPS)
        request.is_retracted = True
        request.found = 0

    # Results ----------------------------------------------------------------------------------------------

    def take(self, done: tuple[str, list[_Req], _Req | None]) -> None:
        kind, requests, chunked = done
        for each in requests:
            if each is chunked or each.is_over or each.is_retracted:
                continue
            each.num_out += 1
            if each.num_out == len(each.ask.output):
                self.insert(each, each.num_owned)
                self.release(each)
                each.is_over = True
                self.step.ended.append(each.index)
            elif kind == "prefill":
                self.insert(each, each.end)

    def insert(self, request: _Req, end: int) -> None:
        """Put the first `end` tokens of a request into the tree, parted where its prompt ends."""
        tokens = self.tree.whole(request.known[:end])
        priority = request.ask.priority
        node = self.tree.insert(tokens, request.num_shared, request.num_inserted, priority)
        request.num_inserted = len(tokens)
        prompt = self.tree.whole(request.ask.prompt)
        if 0 < len(prompt) < len(tokens):
            self.tree.insert(prompt, len(prompt), len(prompt), priority + 1)
        self.tree.lock(request.node, -1, request)
        self.tree.lock(node, 1, request)
        request.node, request.num_shared, request.start = node, len(tokens), request.end

    def release(self, request: _Req) -> None:
        """Free what a request has, and let what the tree has of it be evicted."""
        self.tree.num_free += self.ceil(request.num_owned) - request.num_shared
        self.tree.lock(request.node, -1, request)
        request.node = None


def naive_steps(load: SglangLoad) -> Iterator[SglangStep]:
    """Yield what the restatement does in each step, until all requests have ended."""
    make = NaiveSglang
    if load.window:
        from oracles.naive_windows import NaiveWindowSglang

        make = NaiveWindowSglang
    if load.slots:
        from oracles.naive_states import NaiveStateSglang

        make = NaiveStateSglang
    server, requests = make(load), [_Req(index, ask) for index, ask in enumerate(load.asks)]
    step = num_arrived = count = 0
    while not all(each.is_over for each in requests):
        arrived: list[_Req] = []
        count += 1000 if server.last is not None and server.last[0] == "prefill" else 1
        has_none = server.queued is None and all(each.is_over for each in requests[:num_arrived])
        if count >= load.recv_interval or has_none:  # without work, steps take no time
            count = 0
            arrived = [each for each in requests[num_arrived:] if each.ask.step <= step]
        num_arrived += len(arrived)
        yield server.run_step(arrived)
        step += 1
