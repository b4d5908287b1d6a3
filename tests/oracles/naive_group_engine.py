"""A naive engine with KV groups: of every request, every group and every token, what is held, found and given back.

The order of a step is that of the naive engine; parts are those of the naive cache with groups. What is wanted of
memory is what vLLM wants, and a request releases at its turn, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from kvarts.core.kv.layers import KvLayer

from oracles.naive import Batch, NaiveEngine, NaiveRequest, NaiveStep, Page
from oracles.naive_grouped import NaiveGroups, NaivePart, NaiveSequence, has_state
from oracles.naive_kv_groups import kept_pages

__all__ = ["NaiveGroupEngine"]


class CountingGroups(NaiveGroups):
    """Counts the bytes that have gone out of use."""

    released_bytes = 0

    def release(self, part: NaivePart, *, is_passed: bool = False) -> None:
        super().release(part, is_passed=is_passed)
        if part.refs == 0:
            self.released_bytes += self.bytes_of(part)


class NaiveGroupEngine(NaiveEngine):
    """Memory is counted in bytes. `groups`: what a layer keeps, and the bytes of a part."""

    settles_late = True
    """Whether decodes release what their windows have passed when the next step begins, and not when the step ends."""

    def __init__(
        self,
        groups: Sequence[tuple[KvLayer, int]],
        *,
        keeps_all: bool,
        at_branches: bool = False,
        interval: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.layers = list(groups)
        page_bytes = sum(part_bytes for layer, part_bytes in groups if not has_state(layer))
        self.total_bytes = self.num_pages * page_bytes
        self.block_bytes = gcd(*(part_bytes for _, part_bytes in groups))
        self.groups = CountingGroups(self.layers, self.page_size, self.total_bytes, keeps_all=keeps_all)
        self.groups.interval = interval
        self.sequences: dict[int, NaiveSequence] = {}
        self.at_branches = at_branches
        self.branches: dict[int, int] = {}
        """Tokens before the place where a request leaves others."""
        self.decoding: set[int] = set()
        self.continued: set[int] = set()
        """Those that go on with a chunk after they have decoded: no prompt ends where they do."""
        """Requests that have sampled a token since they were last admitted."""
        self.counts: list[tuple[int, ...]] = []
        """Parts used and cached in each group, at the mark of each step."""
        self.joined: set[int] = set()
        """Requests that began to decode in the last step."""

    # Memory -----------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.groups.free_bytes()

    def mark_of(self) -> tuple[int, int, int, tuple[int, ...]]:
        cached_bytes = sum(self.groups.bytes_of(part) for part in self.groups.released)
        used: set[NaivePart] = set()
        for sequence in self.sequences.values():
            used |= {part for parts in sequence.parts for part in parts.values()} | set(sequence.states.values())
        counts: list[int] = []
        for group in range(len(self.layers)):
            counts.append(sum(part.group == group for part in used))
            counts.append(sum(part.group == group for part in self.groups.released))
        return self.used_bytes, cached_bytes, self.groups.released_bytes, tuple(counts)

    def while_computing(self, start: int, end: int) -> dict[int, set[int]]:
        """The pages of each group that tokens [start, end) need."""
        return {
            group: kept_pages(layer, end, self.page_size, end - start)
            for group, (layer, _) in enumerate(self.layers)
            if not has_state(layer)
        }

    def most_new(self) -> int:
        """The most tokens of a chunk."""
        return self.max_num_batched_tokens

    def most_pages(self, layer: KvLayer) -> int | None:
        """vLLM's bound of the pages that a request holds at one time; None for a layer that keeps all tokens."""
        if layer.kind not in ("window", "chunk"):
            return None
        reach = (layer.span or 1) - (layer.kind == "window") + self.most_new()
        pages = {position // self.page_size for position in range(reach)}
        sink = {position // self.page_size for position in range(layer.sink)}
        return len(pages) + len(sink) + (layer.kind == "window")

    def wanted(self, start: int, known: int, end: int, found: list[dict[int, NaivePart]]) -> int:
        """The bytes to be free for a request that found the first `start` tokens and computes those up to `end` first.

        Pages that were found are not taken, nor is room for them, though a window may have passed them. Parts that
        nothing holds yet are free now, and are not afterwards.
        """
        in_all = in_step = idle = 0
        hit = set(range(start // self.page_size))
        for group, (layer, part_bytes) in enumerate(self.layers):
            idle += part_bytes * sum(part.refs == 0 for part in (found[group].values() if found else ()))
            if has_state(layer):
                in_all += part_bytes
                in_step += part_bytes
                continue
            most = self.most_pages(layer)
            pages = {position // self.page_size for position in range(known)}
            in_all += part_bytes * max(0, min(len(pages), len(pages) if most is None else most) - len(hit))
            in_step += part_bytes * len({position // self.page_size for position in range(end)} - hit)
        return max(in_all, in_step) + idle

    def most_of(self, known: int) -> int:
        """The most bytes that a request holds at one time, without snapshots."""
        asked = 0
        for layer, part_bytes in self.layers:
            pages = len({position // self.page_size for position in range(known)})
            most = self.most_pages(layer)
            if has_state(layer):
                pages = 1
            elif most is not None:
                # What begins inside a page may reach into one more.
                pages = min(pages, most + (layer.kind == "chunk" and (layer.span or 1) % self.page_size > 0))
            asked += part_bytes * pages
        return asked

    def fits(self, head: NaiveRequest, num_bytes: int) -> bool:
        return num_bytes <= self.groups.free_bytes()

    # Requests ---------------------------------------------------------------------------------------------

    def most_bytes(self, request: NaiveRequest) -> int:
        """What a request may need at most."""
        num_tokens = len(request.tokens) + request.num_output - 1
        asked = self.most_of(max(1, num_tokens))
        if num_tokens > self.page_size:  # it may begin from a snapshot
            asked += sum(part_bytes for layer, part_bytes in self.layers if has_state(layer))
        return asked

    def submit(self, request: NaiveRequest) -> None:
        if self.most_bytes(request) > self.total_bytes:
            request.rejected = True
            self.finished.append(request)
            return
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: -r.priority)

    def release(self, request: NaiveRequest) -> None:
        self.decoding.discard(request.seq)
        self.continued.discard(request.seq)
        sequence = self.sequences.pop(request.seq)
        sequence.num_tokens = request.computed
        self.groups.close(sequence)

    def tokens_of(self, request: NaiveRequest, count: int) -> list[Any]:
        return [request.token(index) for index in range(count)]

    def compute_chunk(self, request: NaiveRequest, want: int) -> None:
        sequence = self.sequences[request.seq]
        end = request.computed + want
        sequence.tokens[:] = self.tokens_of(request, end)
        is_last = end == request.known and request.seq not in self.continued
        page_end = (end - is_last) // self.page_size * self.page_size  # where the same prompt resumes
        branch = self.branches.get(request.seq, 0)
        self.take_pages_of(request, want)  # all at once, as in vLLM: none is taken from a snapshot that it makes
        if request.computed < branch < end:
            self.groups.grow(sequence, branch - sequence.num_tokens, is_end=True, is_midway=True)
        is_end = is_last or request.computed < branch == end
        if is_end and sequence.num_tokens < page_end < end:
            self.groups.grow(sequence, page_end - sequence.num_tokens, is_end=True, is_midway=True)
        self.groups.grow(sequence, end - sequence.num_tokens, is_end=is_end, is_midway=not is_last)
        self.count_computed(request, end)

    def take_pages_of(self, request: NaiveRequest, want: int) -> None:
        """Parts are taken at the request's turn, before it is certain that the tokens are computed."""
        sequence = self.sequences[request.seq]
        pages = {(request.computed + each) // self.page_size for each in range(want)}
        for group, (layer, _) in enumerate(self.layers):
            for page in sorted(pages - set(sequence.parts[group])) if not has_state(layer) else ():
                if page >= -(-request.computed // self.page_size):
                    sequence.parts[group][page] = self.groups.take(group)

    def missing(self, request: NaiveRequest, want: int) -> int:
        """The bytes that the next tokens of a request need and it does not have."""
        return self.groups.missing(self.sequences[request.seq], want)

    def fill(self, request: NaiveRequest) -> None:
        """A decode computes a token; its page can be found if that is the last one of the page."""
        self.count_computed(request, request.computed + 1)
        sequence = self.sequences[request.seq]
        sequence.tokens[:] = self.tokens_of(request, request.computed)
        sequence.num_tokens = request.computed
        page = (request.computed - 1) // self.page_size
        if request.computed % self.page_size == 0:
            for group, (layer, _) in enumerate(self.layers):
                if not has_state(layer) and self.groups.retains(sequence, group, page):
                    part = sequence.parts[group][page]
                    self.groups.publish(part, self.groups.name(sequence.tokens, sequence.salt, page))

    def settle(self, request: NaiveRequest) -> None:
        """What no later token needs goes back, the deepest first."""
        sequence = self.sequences[request.seq]
        for group, (layer, _) in enumerate(self.layers):
            needed = self.groups.needed(layer, request.computed)
            next_page = request.computed // self.page_size  # drafts take pages from it on
            for page in sorted(sequence.parts[group], reverse=True):
                if page < next_page and page not in needed:
                    self.groups.release(sequence.parts[group].pop(page))

    def can_settle(self, joined: set[int]) -> bool:
        """Whether turns make no difference in the next step.

        All pages that decodes begin in it are free already, or empty if released ones may become empty, and no chunk,
        nor any who only now begins to decode, has
        its turn before a decode.
        """
        decodes = [r.seq in self.decoding for r in self.running]
        others = [place for place, r in enumerate(self.running) if r.seq in joined or not decodes[place]]
        if self.long_prefill_token_threshold and any(any(decodes[place + 1 :]) for place in others):
            return False
        page_bytes = sum(part_bytes for layer, part_bytes in self.layers if not has_state(layer))
        begins = [r for r in self.running if r.seq in self.decoding and r.computed % self.page_size == 0]
        is_sparse = self.groups.interval is not None
        return page_bytes * len(begins) <= (self.groups.empty_bytes if is_sparse else self.groups.free_bytes())

    def settle_decodes(self) -> None:
        if self.can_settle(self.joined):
            for request in self.running:
                if request.seq in self.decoding:
                    self.settle(request)

    def junction(self, tokens: list[Any], tenant: str | None, length: int, limit: int) -> int:
        """The pages that all layers which keep all tokens have, if they are more than those that were found."""
        whole = [group for group, (layer, _) in enumerate(self.layers) if layer.kind in ("full", "latent")]
        page = 0
        while whole and page < limit:
            name = self.groups.name(tokens, tenant, page)
            if any((group, name) not in self.groups.copies for group in whole):
                break
            page += 1
        return page if page > length else 0

    def is_of_step(self, group: int, tokens: list[Any], tenant: object, length: int) -> bool:
        """Whether the step computes the state of a group after the first `length` pages, or one like it."""
        layer, _ = self.layers[group]
        if layer.kind != "state" or has_state(layer) or not length:
            return False
        name = self.groups.name(tokens, tenant, length - 1)  # type: ignore[arg-type]
        return (group, name) in self.groups.published

    # A step -----------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        if self.settles_late:
            self.settle_decodes()
        self.begin_step(now_ns)
        self.groups.published.clear()
        budget = self.max_num_batched_tokens
        is_limited = self.long_prefill_token_threshold and len(self.running) + self.num_waiting() > 1
        self.most_tokens = self.long_prefill_token_threshold if is_limited else budget
        before: dict[int, int] = {}
        num_preempted = 0
        mark: tuple[int, int, int, tuple[int, ...]] = (-1, 0, 0, ())

        def look() -> None:
            nonlocal mark
            seen = self.mark_of()
            mark = seen if seen[0] > mark[0] else mark

        took: dict[int, tuple[NaiveRequest, int]] = {}
        chunks: set[int] = set()

        def compute_planned() -> None:
            for request, want in took.values():
                if request.seq in before:
                    continue
                before[request.seq] = request.computed
                if request.seq in chunks:
                    self.compute_chunk(request, want)
                else:
                    self.fill(request)

        for request in list(self.running):
            if budget == 0:
                break
            if request not in self.running:
                continue
            want = min(request.known - request.computed, budget, self.most_tokens)
            want += self.num_drafted(request)
            is_decode = request.seq in self.decoding
            priorities = [other.priority for other in self.running]
            if not is_decode and priorities == sorted(priorities)[::-1]:
                compute_planned()  # none of these can be preempted any more
            self.settle(request)
            missing = self.missing(request, want)
            while missing > self.groups.free_bytes():
                if self.others_preempt_for(request, missing):
                    break
                look()
                victim = self.victim()
                if victim.seq in took:
                    budget += took.pop(victim.seq)[1]
                self.preempt(victim, request, now_ns)
                num_preempted += 1
                if victim is request:
                    break
            if request not in self.running:
                # As in vLLM, none that was admitted after it computes. A decode among them goes on with a chunk.
                stalled = self.decoding & ({other.seq for other in self.running} - set(took))
                self.decoding -= stalled
                self.continued |= stalled
                break
            if not is_decode:
                chunks.add(request.seq)
            self.take_pages_of(request, want)
            took[request.seq] = (request, want)
            budget -= want
        compute_planned()
        self.begin_admissions(before)
        while not num_preempted and self.waiting and len(self.running) < self.max_num_seqs and budget:
            head = self.choose_head(self.waiting, now_ns)
            tokens = self.tokens_of(head, head.known)
            length = self.groups.hit(tokens, head.tenant, (head.known - 1) // self.page_size)  # type: ignore[arg-type]
            hit_tokens = length * self.page_size
            sequence = NaiveSequence(tokens, head.tenant, hit_tokens, [])  # type: ignore[arg-type]
            for group, (layer, _) in enumerate(self.layers):
                pages = sorted(self.groups.needed(layer, hit_tokens))
                names = {page: self.groups.name(tokens, sequence.salt, page) for page in pages}
                sequence.parts.append({page: self.groups.copies[group, names[page]][0] for page in pages})
            if any(self.is_of_step(group, tokens, head.tenant, length) for group in range(len(self.layers))):
                break
            want = min(head.known - hit_tokens, budget, self.most_tokens)
            num_padded = self.num_padded(head, [Page()] * length)
            if 1 + num_padded > budget:
                break
            wanted = self.wanted(hit_tokens, head.known + num_padded, hit_tokens + want + num_padded, sequence.parts)
            if num_padded and not self.running and not self.fits(head, wanted):
                num_padded = 0  # nothing will release memory
                wanted = self.wanted(hit_tokens, head.known, hit_tokens + want, sequence.parts)
            if not self.fits(head, wanted + self.block_bytes * self.num_kept(self.total_bytes // self.block_bytes)):
                break
            self.waiting.remove(head)
            for part in [part for parts in sequence.parts for part in parts.values()]:
                if part.refs == 0:
                    self.groups.released.remove(part)
                part.refs += 1
            self.sequences[head.seq] = sequence
            sequence.num_prompt = len(head.tokens)
            sequence.junction = self.junction(tokens, sequence.salt, length, (head.known - 1) // self.page_size)
            if self.at_branches:
                branch = self.groups.branch(tokens, sequence.salt, (head.known - 1) // self.page_size)
                self.branches[head.seq] = branch * self.page_size if branch > length else 0
            self.running.append(head)
            head.seniority = self.take_seniority()
            head.admissions += 1
            if head.first_admitted_ns is None:
                head.first_admitted_ns = now_ns
            head.others_hit_tokens += max(0, hit_tokens - head.furthest)
            head.furthest = max(head.furthest, hit_tokens)
            head.computed = before[head.seq] = hit_tokens
            if num_padded:
                self.take_pages_of(head, want + num_padded)
            self.compute_chunk(head, want)
            budget -= want + num_padded
        look()
        self.budget_left, self.num_preempted = budget, num_preempted
        self.end_step()
        num_preempted += self.take_given()
        if budget == self.max_num_batched_tokens and not num_preempted:
            return self.pause_until()
        batch = Batch([], [])
        for request in self.running:
            if request.seq in before:
                if before[request.seq] < len(request.tokens):
                    batch.prefills.append((request, before[request.seq], request.computed))
                if request.computed == request.known and request.made > 0:
                    batch.decodes.append((request, request.known))
        duration_ns = self.cost(batch, self)
        end_ns = now_ns + duration_ns
        num_running, num_waiting = len(self.running), len(self.waiting)
        joined: set[int] = set()
        for request in list(self.running):
            if request.seq in before and request.computed == request.known:
                num_right = self.num_right(request)
                self.count_computed(request, request.computed + num_right)
                request.made += 1 + num_right
                if request.seq not in self.decoding:
                    joined.add(request.seq)
                self.decoding.add(request.seq)
                request.token_times_ns.append(end_ns)
                if request.first_token_ns is None:
                    request.first_token_ns = end_ns
                if request.made == request.num_output:
                    request.last_token_ns = end_ns
                    self.running.remove(request)
                    self.release(request)
                    self.finished.append(request)
        self.joined = joined
        if not self.settles_late:
            self.settle_decodes()
        used, cached, released, counts = mark
        self.steps.append(
            NaiveStep(
                now_ns,
                duration_ns,
                used,
                cached,
                released,
                num_running,
                num_waiting,
                num_preempted,
                self.max_num_batched_tokens - budget,
                not self.has_work(),
            )
        )
        self.counts.append(counts)
        return end_ns
