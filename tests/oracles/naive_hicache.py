"""SGLang's HiCache: host memory below the tree of the restatement, and storage below that.

A node is on the device, on the host, or on both.

A copy takes a number of steps. What is on the host counts from when its copy is queued; what is loaded is on the device
from when its load is planned. Copies of nodes that only the host has are evicted there; the others keep their room,
except with write_back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from oracles.naive_sglang import NaiveRadixTree, SglangLoad, _Node, _Req, length_of

__all__ = ["NaiveHostTree", "NaiveStoredTree"]

LEAST_LOADED = 10
"""The fewest tokens that are loaded; fewer are computed again."""
THRESHOLDS = {"write_through": 1, "write_through_selective": 2, "write_back": 0}
"""The insertions after which a node is copied; 0: it is when the device evicts it."""


class _HostNode(_Node):
    children: Any
    parent: Any

    def __init__(self, parent: _HostNode | None, tokens: tuple[int, ...], time: float) -> None:
        super().__init__(parent, tokens, time)
        self.is_on_device, self.is_on_host = True, False
        self.copy: _Copy | None = None
        """Its copy that is queued or under way."""
        self.load: _Copy | None = None
        self.holders: list[Any] = []
        """The writes to storage and the reads from it that keep what the host has of it."""

    def copy_to(self, upper: _Node) -> None:
        super().copy_to(upper)
        assert isinstance(upper, _HostNode)
        upper.is_on_device, upper.is_on_host = self.is_on_device, self.is_on_host
        upper.copy, upper.load, upper.holders = self.copy, self.load, list(self.holders)


class _Copy:
    """A copy to the host, or a load of the nodes up to one."""

    def __init__(self, node: _HostNode) -> None:
        self.node, self.end = node, -1


class NaiveHostTree(NaiveRadixTree):
    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load.size, load.page_size)
        self.load_of = load
        self.root = _HostNode(None, (), 0)
        self.num_host_free = (int(load.size * load.host_ratio) // load.page_size + 1) * load.page_size
        self.threshold = THRESHOLDS[load.write_policy]
        self.queued: list[_Copy] = []
        self.writes: list[list[_Copy]] = []
        self.to_load: list[_Copy] = []
        self.loads: list[list[_Copy]] = []
        self.doubles: dict[_HostNode, None] = {}
        """Nodes that have been on both since a time; some are not any more."""

    def all_nodes(self) -> Iterator[_HostNode]:
        yield from super().nodes()  # type: ignore[misc]

    def nodes(self) -> Iterator[_Node]:
        return (node for node in self.all_nodes() if node.is_on_device)

    def on_device(self, node: _Node) -> _HostNode:
        assert isinstance(node, _HostNode)
        return node if node.is_on_device else self.on_device(node.parent)

    # Copies -----------------------------------------------------------------------------------------------

    def begin_step(self, waiting: list[_Req]) -> None:
        """Take note of the copies and loads that have ended, the first ones first."""
        self.start_writes()
        while self.writes and self.writes[0][0].end <= self.step:
            for copy in self.writes.pop(0):
                parts = [node for node in self.all_nodes() if node.copy is copy]
                for node in sorted(parts, key=length_of):
                    node.copy = None
                    self.store(node)
                self.lock(copy.node, -1)
        while self.loads and self.loads[0][0].end <= self.step:
            for load in self.loads.pop(0):
                self.lock(load.node, -1)
                node = load.node
                while node.parent is not None:
                    if node.load is load:
                        node.load = None
                        self.note_double(node)
                    node = node.parent

    def store(self, node: _HostNode) -> None:
        """Write a node to storage, if there is one."""

    def start_writes(self) -> None:
        for copy in self.queued:
            copy.end = self.step + self.load_of.d2h_steps
        if self.queued:
            self.writes.append(self.queued)
        self.queued = []

    def start_loads(self) -> None:
        for load in self.to_load:
            load.end = self.step + self.load_of.h2d_steps
        if self.to_load:
            self.loads.append(self.to_load)
        self.to_load = []

    def note_double(self, node: _HostNode) -> None:
        if node.is_on_device and node.is_on_host and node.copy is None and node.load is None:
            self.doubles.setdefault(node)
        else:
            self.doubles.pop(node, None)

    def count(self, node: _HostNode, end: int, num_inserted: int) -> None:
        """Count an insertion, and copy the node, with those before it that have no copy, if it is time."""
        if end <= num_inserted or not self.threshold:
            return
        node.num_inserted += 1
        if node.is_on_host or node.num_inserted < self.threshold:
            return
        chain = []
        while node.parent is not None and not node.is_on_host:
            chain.append(node)
            node = node.parent
        for each in reversed(chain):
            if not self.take_host(len(each.tokens)):
                return
            each.is_on_host = True
            each.copy = _Copy(each)
            self.lock(each, 1)
            self.queued.append(each.copy)

    def take_host(self, num_tokens: int) -> bool:
        """Take room on the host, if it can be made."""
        lacking = num_tokens - self.num_host_free
        if lacking > 0 and self.evict_host(lacking) < lacking:
            return False
        self.num_host_free -= num_tokens
        return True

    def evict_host(self, num_tokens: int) -> int:
        num_free = self.num_host_free
        if not self.threshold:
            for spares in (True, False):
                for node in list(self.doubles):
                    if self.num_host_free - num_free >= num_tokens:
                        break
                    if not (node.is_on_device and node.is_on_host):
                        del self.doubles[node]
                    elif not (spares and self.is_leaf(node)) and node.load is None:
                        node.is_on_host = False
                        self.num_host_free += len(node.tokens)
                        del self.doubles[node]
        while self.num_host_free - num_free < num_tokens:
            leaves = [node for node in self.all_nodes() if not (node.is_on_device or node.num_locks or node.children)]
            leaves = [node for node in leaves if not node.holders]
            if not leaves:
                break
            self.drop(min(leaves, key=lambda node: node.time))
        return self.num_host_free - num_free

    def drop(self, node: _HostNode) -> None:
        """Drop a node, and all that follows it, from both."""
        for child in list(node.children.values()):
            assert isinstance(child, _HostNode) and not child.is_on_device
            self.drop(child)
        if node.is_on_device:
            self.num_free += len(node.tokens)
        if node.is_on_host:
            self.num_host_free += len(node.tokens)
        node.is_on_device = node.is_on_host = False
        del node.parent.children[node.tokens[: self.page_size]]

    # As NaiveRadixTree ------------------------------------------------------------------------------------

    def _split(self, node: _Node, length: int) -> _Node:
        upper = super()._split(node, length)
        assert isinstance(upper, _HostNode)
        if not self.threshold:
            self.note_double(upper)
        return upper

    def insert(self, tokens: Sequence[int], own_from: int, num_inserted: int = 0, priority: int = 0) -> _Node:
        """Add whole pages; those of nodes that only the host has are the request's from now on."""
        tokens, at = self.whole(tokens), 0
        node: Any = self.root
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                new = _HostNode(node, tuple(tokens[at:]), self.now())
                node.children[new.tokens[: self.page_size]] = new
                self.count(new, len(tokens), num_inserted)
                return new
            child.time = self.now()
            node = self._split(child, length) if length < len(child.tokens) else child
            if node.is_on_device:
                self.num_free += max(0, at + length - max(at, own_from))
            else:
                assert own_from <= at
                node.is_on_device = True
                self.note_double(node)
            at += length
            self.count(node, at, num_inserted)
        last: _HostNode = node
        return last

    def is_leaf(self, node: _HostNode) -> bool:
        """Return whether the device may evict `node`."""
        return not node.num_locks and not any(child.is_on_device for child in node.children.values())

    def make_room(self, num_tokens: int) -> None:
        """Evict from the device; what is on the host as well stays there. With write_back, it is copied first."""
        while self.num_free < num_tokens:
            leaves = [node for node in self.all_nodes() if node.is_on_device and self.is_leaf(node)]
            if not leaves:
                return
            oldest = min(leaves, key=lambda node: node.time)
            assert oldest.copy is None
            if not oldest.is_on_host and not self.threshold and self.take_host(len(oldest.tokens)):
                oldest.is_on_host = True
                self.note_double(oldest)
            if oldest.is_on_host:
                oldest.is_on_device = False
                self.num_free += len(oldest.tokens)
            else:
                self.drop(oldest)

    def load_back(self, node: _Node) -> bool:
        """Load what only the host has of the path to `node`, if that is worth it and there is room."""
        assert isinstance(node, _HostNode)
        nodes: list[_HostNode] = []
        above = node
        while not above.is_on_device:
            nodes.append(above)
            above = above.parent
        num_tokens = sum(len(each.tokens) for each in nodes)
        if num_tokens < LEAST_LOADED:
            return False
        self.lock(node, 1)
        self.make_room(num_tokens)
        if self.num_free < num_tokens:
            self.lock(node, -1)
            return False
        self.num_free -= num_tokens
        load = _Copy(node)
        self.to_load.append(load)
        for each in nodes:
            each.is_on_device = True
            each.load = None if self.threshold else load
        return True


class _Write:
    """A node to be written to storage: the tokens up to its end, and those before it and before what is to be done."""

    def __init__(self, tokens: tuple[int, ...], start: int) -> None:
        self.tokens, self.done = tokens, start


class _Read:
    """Tokens from `start` to `end` of what a request knows, to be read from storage."""

    def __init__(self, request: _Req, start: int, end: int, is_known: bool) -> None:
        self.request, self.start, self.end, self.is_known = request, start, end, is_known
        self.tokens = tuple(request.known[:end])
        self.found: int | None = None
        self.taken: int | None = None
        self.num_read = self.num_noted = 0
        self.is_over = self.is_late = False


class _Lane:
    """One of SGLang's threads: the items that wait for it, with the steps in which they came, and the one it is at."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Any]] = []
        self.item: Any = None
        self.time = self.end = -1


class NaiveStoredTree(NaiveHostTree):
    """A tree with host memory and storage. Rounds of notes precede each plan."""

    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load)
        self.all_tokens = self.num_host_free
        self.stored = {tuple(prefix) for index in load.stored for prefix in self.prefixes(self.whole_of(index))}
        self.writing, self.querying, self.reading = _Lane(), _Lane(), _Lane()
        self.done: list[tuple[str, Any, Any]] = []
        """What the lanes have done since the last round."""
        self.spare = 0
        """Tokens of room that was taken and not read into."""
        self.reads: dict[_Req, _Read] = {}
        self.retries: dict[_Req, tuple[int | None, int | None]] = {}
        """Until which token storage is known to have what a request lacks, and the round in which it asks again."""
        self.num_retries: dict[_Req, int] = {}
        self.lengths: dict[_Req, int] = {}
        self.since: dict[_Req, tuple[int, float]] = {}
        self.late: set[_Req] = set()
        self.came: dict[_Req, tuple[int, int]] = {}
        self.num_rounds = 0
        self.threshold_of_reads = max(int(load.storage_config["prefetch_threshold"]), load.page_size)

    def whole_of(self, index: int) -> Sequence[int]:
        ask = self.load_of.asks[index]
        return self.whole(ask.prompt + ask.output)

    def prefixes(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        return (tokens[:end] for end in range(self.page_size, len(tokens) + 1, self.page_size))

    # The lanes --------------------------------------------------------------------------------------------

    def begin(self, lane: _Lane) -> int:
        """Return the steps of the next piece of what a lane is at."""
        load, item = self.load_of, lane.item
        if lane is self.writing:
            return load.write_steps
        if item.is_over or (lane is self.querying and item.is_known):
            return 0
        return load.query_steps if lane is self.querying else load.read_steps

    def finish(self, lane: _Lane) -> bool:
        """Do what ends now; return whether there is another piece."""
        item, piece = lane.item, self.load_of.batch_pages * self.page_size
        if lane is self.writing:
            end = min(item.done + piece, len(item.tokens))
            self.stored.update(item.tokens[:at] for at in range(item.done + self.page_size, end + 1, self.page_size))
            item.done = end
            if end < len(item.tokens):
                return True
            self.done.append(("written", item, None))
            return False
        if lane is self.querying:
            item.found = 0
            while item.start + item.found < item.end:
                upto = item.tokens[: item.start + item.found + self.page_size]
                if lane.item.skipped or not (item.is_known or upto in self.stored):
                    break
                item.found += self.page_size
            self.done.append(("answered", item, None))
            return False
        if not item.is_over:
            item.num_read = min(item.num_read + piece, item.taken)
            self.done.append(("read", item, item.num_read))
            if item.num_read < item.taken:
                return True
        self.done.append(("ended", item, None))
        return False

    def run(self) -> None:
        for lane in (self.writing, self.querying, self.reading):
            while lane.item is not None or lane.waiting:
                if lane.item is None:
                    put, lane.item = lane.waiting.pop(0)
                    lane.item.skipped = lane is self.querying and lane.item.is_over
                    lane.time = max(lane.time, put)
                    lane.end = lane.time + self.begin(lane)
                if lane.end > self.step:
                    break
                lane.time = lane.end
                if self.finish(lane):
                    lane.end = lane.time + self.begin(lane)
                else:
                    lane.item = None
        self.num_stored = len(self.stored) * self.page_size

    # Rounds -----------------------------------------------------------------------------------------------

    def begin_step(self, waiting: list[_Req]) -> None:
        self.run()
        done, spare, self.done, self.spare = self.done, self.spare, [], 0
        super().begin_step(waiting)
        for kind in ("answered", "read ended", "written"):
            for name, item, more in done:
                if name not in kind:
                    continue
                if name == "answered":
                    self.note_answer(item)
                elif name == "written":
                    self.release(item)
                else:
                    self.note_read(item, more)
        self.num_host_free += spare
        self.num_rounds += 1
        if waiting:
            self.retries.pop(waiting[0], None)
        for request in [each for each in waiting if each in self.retries]:
            end, due = self.retries[request]
            if self.num_retries[request] >= self.load_of.max_retries or self.load_of.retry_interval <= 0:
                del self.retries[request]
                continue
            if due is None:
                due = self.num_rounds + self.load_of.retry_interval
                self.retries[request] = end, due
            if due <= self.num_rounds:
                del self.retries[request]
                self.num_retries[request] += 1
                self.ask(request, end)

    def release(self, holder: Any) -> None:
        for node in self.all_nodes():
            if holder in node.holders:
                node.holders.remove(holder)

    def forget(self, request: _Req) -> None:
        read = self.reads.pop(request)
        self.release(read)
        self.num_asked -= read.end - read.start

    def note_answer(self, read: _Read) -> None:
        request = read.request
        if request not in self.reads:
            return
        assert read.found is not None
        if read.is_over or read.found < self.threshold_of_reads:
            if not read.is_late:
                self.retries[request] = None, None
            self.forget(request)
            return
        wanted = read.found
        if self.num_host_free < wanted:
            self.evict_host(wanted)
            wanted = min(wanted, self.num_host_free)
        if wanted < self.threshold_of_reads:
            self.forget(request)
            self.retries[request] = read.start + read.found, None
            return
        self.num_host_free -= wanted
        read.taken = wanted
        self.reading.waiting.append((self.step, read))

    def note_read(self, read: _Read, num_read: int | None) -> None:
        is_wanted = self.reads.get(read.request) is read
        if num_read is not None:
            if is_wanted:
                read.num_noted = num_read
            return
        if is_wanted:
            self.take_over(read)
        assert read.taken is not None
        self.spare += read.taken - read.num_noted

    def take_over(self, read: _Read) -> None:
        """Put what was read into the tree, below the node that it follows."""
        tokens, at = read.tokens[: read.start + read.num_noted], read.start
        above: Any = self.root
        for node in self.all_nodes():
            if read in node.holders and length_of(node) == read.start:
                above = node
        if above is not self.root:
            above.time = self.now()
        twice = 0
        while at < len(tokens):
            child, length = self._child(above, tokens, at)
            if child is None:
                node = _HostNode(above, tokens[at:], self.now())
                node.is_on_device, node.is_on_host = False, True
                above.children[node.tokens[: self.page_size]] = node
                at = len(tokens)
            else:
                child.time = self.now()
                above = self._split(child, length) if length < len(child.tokens) else child
                twice += length * above.is_on_host
                above.is_on_host = True
                at += length
        self.num_host_free += twice
        self.forget(read.request)
        self.came[read.request] = read.start + twice, len(tokens)

    def store(self, node: _HostNode) -> None:
        tokens: tuple[int, ...] = ()
        above: Any = node
        while above.parent is not None:
            tokens, above = above.tokens + tokens, above.parent
        write = _Write(tokens, len(tokens) - len(node.tokens))
        node.holders.append(write)
        self.writing.waiting.append((self.step, write))

    # Requests ---------------------------------------------------------------------------------------------

    def ask_storage(self, request: _Req) -> None:
        self.num_retries[request] = 0
        self.ask(request, None)

    def ask(self, request: _Req, known_end: int | None) -> None:
        node: Any = self.match(request.known[:-1])
        start = self.lengths[request] = length_of(node)
        if node is not self.root and not node.is_on_host:
            return
        self.retries.pop(request, None)
        if request in self.late or request in self.reads:
            return
        end = (len(request.known) - 1) // self.page_size * self.page_size
        is_known = known_end is not None and start < known_end <= end
        if is_known:
            assert known_end is not None
            end = known_end
        if end - start < self.threshold_of_reads:
            return
        if self.num_asked >= self.all_tokens // 2:
            self.retries[request] = known_end, None
            return
        read = self.reads[request] = _Read(request, start, end, is_known)
        if node is not self.root:
            node.holders.append(read)
        self.num_asked += end - start
        self.querying.waiting.append((self.step, read))

    def waits(self, request: _Req) -> bool:
        came = self.reads.get(request)
        if came is not None and not self.may_end(came):
            return True
        if came is not None:
            came.is_over = True
            if self.load_of.prefetch_policy == "timeout":
                came.is_late = True
                self.late.add(request)
                self.retries.pop(request, None)
            if came.taken is not None:
                self.take_over(came)
            else:
                if not came.is_late:
                    self.retries[request] = None, None
                self.forget(request)
        first, last = self.came.pop(request, (0, 0))
        if first < last:
            request.fetched = first, last
        return False

    def may_end(self, read: _Read) -> bool:
        policy, config = self.load_of.prefetch_policy, self.load_of.storage_config
        if policy != "timeout":
            return policy == "best_effort"
        num_pages = (read.end - read.start) // self.page_size
        each = self.page_size / 1024 * config["prefetch_timeout_per_ki_token"]
        is_whole = read.taken is not None and read.num_noted >= read.taken
        begun = read.request in self.since
        since, most = self.since.setdefault(
            read.request, (self.step, config["prefetch_timeout_base"] + num_pages * each)
        )
        is_late = begun and (read.request in self.late or (self.step - since) / 1000 > most)
        return is_late and not is_whole

    def has_lost(self, request: _Req) -> bool:
        length = length_of(self.match_of(request))
        if length >= self.lengths[request]:
            return False
        if self.num_retries[request] >= self.load_of.max_retries:
            self.lengths[request] = length
            return False
        self.num_retries[request] += 1
        self.ask(request, None)
        return True

    def match_of(self, request: _Req) -> Any:
        """Return the node that ends what a request finds; it was matched just now, and nothing else was since."""
        return self.match(request.known[:-1])

    def leave_queue(self, request: _Req) -> None:
        self.since.pop(request, None)
        self.late.discard(request)
        self.retries.pop(request, None)
