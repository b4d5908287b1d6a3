"""SGLang's tree and scheduler for a model some of whose layers have sliding windows: the KV of these has its own pool.

Each node has KV of all tokens in the layers with full attention. In the others, its *window KV* is there for all of its
tokens, or for none. A prefix is found if the window KV of its last `window` tokens, or of all, is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oracles.naive_sglang import NaiveRadixTree, NaiveSglang, SglangLoad, SglangStep, _Node, _Req, length_of

__all__ = ["NaiveWindowSglang", "NaiveWindowTree"]

SLIDE_TOKENS = 128
"""The tokens that leave the window of a decode before their window KV is freed."""


class _WindowNode(_Node):
    children: Any
    parent: Any

    def __init__(self, parent: _WindowNode | None, tokens: tuple[int, ...], time: float) -> None:
        super().__init__(parent, tokens, time)
        self.has_window = False
        self.num_window_locks = 0

    def copy_to(self, upper: _Node) -> None:
        super().copy_to(upper)
        assert isinstance(upper, _WindowNode)
        upper.has_window, upper.num_window_locks = self.has_window, self.num_window_locks


class NaiveWindowTree(NaiveRadixTree):
    """`recent` has the nodes with window KV, the most recent first."""

    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load.size, load.page_size)
        self.root = _WindowNode(None, (), 0)
        self.window, self.num_free_of_windows = load.window, load.window_size
        self.recent: list[_WindowNode] = []
        self.lock_starts: dict[int, int] = {}
        """By request, the first token of the nodes whose window KV it keeps."""

    def ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    @property
    def evictable_of_windows(self) -> int:
        return sum(len(node.tokens) for node in self.recent if not node.num_window_locks)

    def note(self, step: SglangStep) -> None:
        step.window_free, step.window_evictable = int(self.num_free_of_windows), self.evictable_of_windows

    def take(self, num_tokens: int) -> None:
        super().take(num_tokens)
        self.num_free_of_windows -= num_tokens
        assert self.num_free_of_windows >= 0

    def _split(self, node: Any, length: int) -> Any:
        upper = super()._split(node, length)
        if node.has_window:
            self.recent.insert(self.recent.index(node) + 1, upper)
        return upper

    def refresh(self, node: _WindowNode) -> None:
        """Make the window KV of the tokens before the end of `node` recent: of a window, and a page."""
        covered, path = 0, []
        while node.parent is not None and covered < self.window + self.page_size:
            if node.has_window:
                path.append(node)
                self.recent.remove(node)
            covered, node = covered + len(node.tokens), node.parent
        self.recent[:0] = path

    def match(self, tokens: Sequence[int]) -> Any:
        node, self.full_hit = self.walk(tokens)
        time, above = float(self.now()), node
        self.refresh(node)
        while above.parent is not None:
            above.time = time
            time, above = time - 1e-5, above.parent
        return node

    def walk(self, tokens: Sequence[int]) -> tuple[Any, int]:
        """Return the node that ends the longest prefix, and the length of the longest one without windows."""
        tokens, at = self.whole(tokens), 0
        node: Any = self.root
        best, live = self.root, float("inf")
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                break
            node, at = child, at + length
            is_split = length < len(child.tokens)
            if is_split:
                node = self._split(child, length)
            live = live + length if node.has_window else 0
            if node.has_window and live >= self.window:
                best = node
            if is_split:
                break
        return best, at

    def insert_from(self, tokens: Sequence[int], own_from: int, evicted: int) -> Any:
        """Add whole pages, as the base; of its own tokens before `evicted`, the request has no window KV."""
        tokens, at = self.whole(tokens), 0
        node: Any = self.root
        while at < len(tokens):
            child, length = self._child(node, tokens, at)
            if child is None:
                self.add(node, tokens, at, evicted)
                break
            child.time = self.now()
            node = self._split(child, length) if length < len(child.tokens) else child
            start, end = at, at + length
            at = end
            if own_from >= end:
                continue
            kept_from, begin = max(start, own_from), max(start, evicted)
            self.num_free += end - kept_from
            if node.has_window or begin >= end:
                self.num_free_of_windows += max(0, end - max(kept_from, evicted))
                continue
            if begin > start:
                self._split(node, begin - start)
            self.give_window(node)
        last = self.walk_to(tokens)
        self.refresh(last)
        return last

    def walk_to(self, tokens: Sequence[int]) -> Any:
        at = 0
        node: Any = self.root
        while at < len(tokens):
            node = node.children[tuple(tokens[at : at + self.page_size])]
            at += len(node.tokens)
        assert at == len(tokens)
        return node

    def add(self, parent: Any, tokens: Sequence[int], start: int, evicted: int) -> None:
        """Add a leaf: without window KV before `evicted`, and with a window at its end as a node of its own."""
        leaf = _WindowNode(parent, tuple(tokens[start:]), self.now())
        parent.children[leaf.tokens[: self.page_size]] = leaf
        begin = max(start, evicted)
        if begin >= len(tokens):
            return
        if begin > start:
            self._split(leaf, begin - start)
        if len(leaf.tokens) > self.ceil(self.window):
            upper = self._split(leaf, len(leaf.tokens) - self.ceil(self.window))
            self.give_window(upper)
        self.give_window(leaf)

    def give_window(self, node: _WindowNode) -> None:
        node.has_window = True
        self.recent.insert(0, node)

    def lock(self, node: _Node, change: int, owner: _Req | None = None) -> None:
        assert owner is not None and isinstance(node, _WindowNode)
        end = length_of(node)
        each: Any = node
        if change > 0:
            start = end
            while each.parent is not None and end - start < self.window:
                start, each = start - len(each.tokens), each.parent
            self.lock_starts[owner.index] = start
        start, each = self.lock_starts[owner.index], node
        while end > start:
            each.num_window_locks += change
            end, each = end - len(each.tokens), each.parent
        super().lock(node, change)

    def make_room(self, num_tokens: int) -> None:
        while self.num_free < num_tokens:
            leaves = [node for node in self.nodes() if self.is_leaf(node)]
            if not leaves:
                break
            self.remove(min(leaves, key=lambda node: node.time))
        while self.num_free_of_windows < num_tokens:
            oldest = next((node for node in reversed(self.recent) if not node.num_window_locks), None)
            if oldest is None:
                break
            if self.is_leaf(oldest):
                self.remove(oldest)
            else:
                self.drop_window(oldest)

    def is_leaf(self, node: _Node) -> bool:
        return not (node.num_locks or node.children)

    def remove(self, node: Any) -> None:
        if node.has_window:
            self.drop_window(node)
        super().remove(node)

    def drop_window(self, node: _WindowNode) -> None:
        node.has_window = False
        self.recent.remove(node)
        self.num_free_of_windows += len(node.tokens)


class NaiveWindowSglang(NaiveSglang):
    tree: NaiveWindowTree

    def __init__(self, load: SglangLoad) -> None:
        super().__init__(load)
        self.tree = NaiveWindowTree(load)

    # Admission --------------------------------------------------------------------------------------------

    def room_of_windows(self) -> float:
        return self.tree.num_free_of_windows + self.tree.evictable_of_windows - self.promised_windows

    def need(self, num_tokens: int, num_new: int, left: int) -> int:
        """Return the window KV that a prompt may have at once: of a chunk beyond the window, of a window and a page."""
        window = self.load.window
        return max(min(num_tokens, left) - window, 0) + min(num_tokens + num_new, window) + self.page_size

    def promise_windows(self, num_tokens: int, num_new: int, left: int) -> None:
        self.promised_windows += self.need(num_tokens, num_new, left)

    def most_of_prompt(self, rest: int, num_new: int, left: int) -> int | None:
        need, room = self.need(rest, num_new, left), self.room_of_windows()
        if need < room:
            return left
        if need < self.load.window_size:
            return None
        most = int(room) - self.need(0, num_new, left)
        most = most // self.page_size * self.page_size
        return min(left, most) if most > 0 else None

    def most_of_chunk(self, left: int, room: float) -> int:
        return min(left, int(room), int(self.room_of_windows()) - self.page_size)

    # Windows ----------------------------------------------------------------------------------------------

    def slide(self, request: _Req, end: int, interval: int) -> None:
        """Free the window KV that tokens after `end` do not attend to, once it is of `interval` tokens."""
        window, page = self.load.window, self.page_size
        if end - window < request.num_slid + interval:
            return
        start = max(request.num_slid, request.num_shared)
        request.num_slid = max(start, end - self.ceil(max(window, page))) // page * page
        self.tree.num_free_of_windows += max(0, request.num_slid - start)
        request.num_slid = max(request.num_slid, start)

    def slide_windows(self) -> None:
        for each in self.running:
            if each.num_decodes:
                self.slide(each, len(each.known) - 1, SLIDE_TOKENS)
            each.num_decodes += 1

    # Insertion --------------------------------------------------------------------------------------------

    def insert(self, request: _Req, end: int) -> None:
        is_over = request.num_out == len(request.ask.output)
        tokens: Sequence[int] = request.known[:end]
        at_branch = request.num_shared < request.branch <= len(tokens)
        if at_branch:
            tokens = tokens[: request.branch]
        if not is_over:
            self.slide(request, len(tokens) - 1, 1)
        tokens = self.tree.whole(tokens)
        node = self.tree.insert_from(tokens, request.num_shared, request.num_slid)
        self.tree.lock(request.node, -1, request)
        self.tree.lock(node, 1, request)
        request.node, request.num_shared, request.start = node, len(tokens), request.end
        if at_branch:
            request.branch = 0
            if not is_over:
                self.slide(request, request.end - 1, 1)

    def release(self, request: _Req) -> None:
        owned = self.ceil(request.num_owned)
        self.tree.num_free_of_windows += owned - max(request.num_shared, request.num_slid)
        super().release(request)
