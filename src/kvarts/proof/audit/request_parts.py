"""Parts of requests, as the audit derives them: their names, taken, published, kept for others, and released."""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain

from kvarts.core.content import Content
from kvarts.core.events import DraftJudged, DraftTaken
from kvarts.proof.audit.ledger import Findings, Ledger, LedgerPart

__all__ = ["KnownRequest", "PageDigests", "RequestParts"]


class PageDigests:
    """Digests of pages, and the request and page where each is found."""

    def __init__(self) -> None:
        self.where: dict[bytes, tuple[int, int]] = {}
        """A request and page named by each resident digest."""
        self._spoken_of: dict[int, Content] = {}
        """Contents, by owner, whose digests were requested since `forget`."""

    def of(self, content: Content, page: int, block_pages: int = 1) -> bytes:
        """Return the digest of a page, as defined by `upto`, or that of a page in a block of several.

        That one is of all tokens up to the end of the block, and of the place in it.
        """
        if block_pages == 1:
            return self.upto(content, page + 1)[page]
        place = page % block_pages
        last = page - place + block_pages - 1
        return self.upto(content, last + 1)[last] + bytes([place])

    def first(self, content: Content, end: int, block_pages: int = 1) -> list[bytes]:
        """Return the digests of the first `end` pages, in such blocks. The caller must not change the list."""
        if block_pages == 1:
            return self.upto(content, end)
        return [self.of(content, page, block_pages) for page in range(end)]

    def upto(self, content: Content, end: int) -> list[bytes]:
        """Return the digests of at least the first `end` pages of a content. The caller must not change the list.

        A digest covers the tenant and all tokens up to the end of the page; if some are unknown, the owner instead.
        """
        digests: list[bytes] | None = content.noted(self)
        if digests is None:
            digests = []
            content.note(self, digests)
        self._spoken_of[content.owner] = content
        num_digests = len(digests)
        if num_digests >= end:
            return digests
        size = content.page_size
        before = digests[-1] if digests else repr(content.salt).encode()
        num_known = min(end, content.num_known_pages)
        if num_digests < num_known:
            tokens = content.tokens(num_digests * size, num_known * size)
            page_bytes = size * tokens.itemsize
            known = memoryview(tokens).cast("B")
            for start in range(0, len(known), page_bytes):
                before = blake2b(before + known[start : start + page_bytes], digest_size=16).digest()
                digests.append(before)
        private = f"private {content.owner}".encode()
        while len(digests) < end:
            before = blake2b(before + private, digest_size=16).digest()
            digests.append(before)
        return digests

    def place(self, digest: bytes) -> tuple[int, int]:
        """Return a request and page named by `digest`, which must be resident or requested since `forget`."""
        place = self.where.get(digest)
        if place is not None:
            return place
        for owner, content in self._spoken_of.items():
            digests: list[bytes] = content.noted(self) or []
            if digest in digests:
                return owner, digests.index(digest)
        raise KeyError(digest)

    def forget(self) -> None:
        """Forget digests that were requested and are not resident."""
        self._spoken_of.clear()


class KnownRequest:
    """The auditor's state of one request. Its first `num_named` pages can be found, as far as it has parts of them.

    `parts`: by group and page, those of its first `num_taken` pages; `states`: by group. `admission`: its place in the
    order of admission. `began`: the tokens computed before the last step in which it computed any, and `before` the
    same of the step before that. `branch`: the tokens before the place where it leaves other requests, 0 for none.
    `junction`: the pages that groups with every page had, if they were more than those of its hit, else 0.
    `drafted`: tokens that were drafted for it in this step. `load`: the pages it waits for, until it is admitted, else
    None; `offer`: the first page, and the pages that are loaded from each tier, if not all that is below; `front`: the
    first page that it computes before these, while they are loaded; `awaited`: the transfer for another request that it
    waits for, or -1; `has_arrived`: its load has ended, without a turn since; `is_cancelled`: it is gone when its
    load has ended. `has_decoded`: it continues with chunks after it has decoded. `is_unread`: a decode computed the
    last of its tokens. `last`: the tokens that it knows when it ends. `stops`: it computes the token that ends it as
    well. `swapped`: while it waits after a preemption that kept its state, the tokens that the state is of; else 0.
    `resumed`: the tokens of the state from which it began, if that was kept; else 0.
    """

    __slots__ = (
        "admission",
        "awaited",
        "before",
        "began",
        "branch",
        "computed",
        "content",
        "drafted",
        "front",
        "has_arrived",
        "has_decoded",
        "is_cancelled",
        "is_running",
        "is_unread",
        "junction",
        "known",
        "last",
        "load",
        "num_named",
        "num_taken",
        "offer",
        "parts",
        "resumed",
        "states",
        "stops",
        "swapped",
    )

    def __init__(self, content: Content, num_prompt_tokens: int, num_groups: int, max_tokens: int = 0) -> None:
        self.content = content
        self.known = num_prompt_tokens
        self.last = num_prompt_tokens + max_tokens
        self.computed = self.began = self.before = self.num_named = self.num_taken = self.drafted = 0
        self.parts: list[dict[int, LedgerPart]] = [{} for _ in range(num_groups)]
        self.states: dict[int, LedgerPart] = {}
        self.is_running = self.is_unread = self.stops = self.has_decoded = False
        self.admission = self.awaited = self.front = -1
        self.branch = self.junction = self.swapped = self.resumed = 0
        self.load: range | None = None
        self.offer: tuple[int, tuple[tuple[str, int], ...]] | None = None
        self.is_cancelled = self.has_arrived = False


class RequestParts:
    """Moves parts in `ledger` for requests. `found` receives the findings.

    `names_private`: a full page of unknown tokens can be found at once; otherwise when its request releases it.
    """

    def __init__(
        self, ledger: Ledger, digests: PageDigests, found: Findings, page_size: int, *, names_private: bool
    ) -> None:
        self._ledger = ledger
        self._digests = digests
        self._found = found
        self._page_size = page_size
        self._names_private = names_private
        self._drafting: list[KnownRequest] = []
        """Requests with drafted tokens that are not judged yet."""

    def hit(self, known: KnownRequest, num_pages: int, *, how: str = "hit") -> None:
        """Hold the parts of the first `num_pages` pages that later tokens need: the copies that a lookup finds."""
        ledger = self._ledger
        for index, group in enumerate(ledger.groups):
            digests = self._digests.first(known.content, num_pages, group.block_pages)
            for page in chain(*group.needed(num_pages * self._page_size, self._page_size)):
                part = ledger.find(index, digests[page])
                if part is None:
                    what = f"was {how} and is not resident{self._ledger.words(index)}"
                    self._found.add(what, known.content.owner, page)
                    continue
                ledger.hold(part)
                known.parts[index][page] = part
        known.num_named = known.num_taken = num_pages
        self.note_junction(known, num_pages)

    def note_junction(self, known: KnownRequest, num_pages: int) -> None:
        """Note the pages of `known` that groups with every page have, if they are more than its hit of `num_pages`."""
        known.junction = self._junction(known, num_pages)

    def _junction(self, known: KnownRequest, num_pages: int) -> int:
        ledger = self._ledger
        whole = [index for index, group in enumerate(ledger.groups) if group.has_every_page]
        if not whole or all(group.interval is None for group in ledger.groups):
            return 0
        page, limit = num_pages, (known.known - 1) // self._page_size
        names = [
            (index, self._digests.first(known.content, limit, ledger.groups[index].block_pages)) for index in whole
        ]
        while page < limit and all(ledger.find(index, digests[page]) is not None for index, digests in names):
            page += 1
        page -= page % ledger.hit_pages
        return page if page > num_pages else 0

    def grow(
        self, known: KnownRequest, num_tokens: int, *, is_end: bool, is_midway: bool = False, num_unread: int = 0
    ) -> None:
        """Take the parts that tokens up to `num_tokens` need, and publish filled ones.

        `is_end`: others may continue from there, as all known tokens are then computed, unless `is_midway`.
        `num_unread`: as for `name`.
        """
        self.take_pages(known, num_tokens)
        known.computed = num_tokens
        self.name(known, num_unread=num_unread)
        if is_end:
            self._keep_tails(known)
            if not is_midway and known.num_named * self._page_size == num_tokens:
                self._keep_tails(known, num_before=1)  # where the same prompt continues, as it computes its last token
            if num_tokens % self._page_size == 0:
                self._take_snapshots(known)

    def take_pages(self, known: KnownRequest, num_tokens: int) -> None:
        """Take the parts that tokens up to `num_tokens` need and the request lacks."""
        pages = range(known.num_taken, max(known.num_taken, -(-num_tokens // self._page_size)))
        prefill_end = max(known.content.num_prompt_tokens, known.known - 1)
        for index, group in enumerate(self._ledger.groups):
            if not group.is_state:
                parts = known.parts[index]
                for page in group.taken(pages, num_tokens, prefill_end):
                    part = self._take(known, index, page)
                    if part is not None:
                        parts[page] = part
            elif index not in known.states:
                part = self._take(known, index, pages.start)
                if part is not None:
                    known.states[index] = part
        known.num_taken = pages.stop

    def _take(self, known: KnownRequest, group: int, page: int) -> LedgerPart | None:
        part = self._ledger.take(group)
        if part is None:
            what = f"was taken{self._ledger.words(group)} where none is free"
            self._found.add(what, known.content.owner, page)
        return part

    def name(self, known: KnownRequest, num_pages: int | None = None, *, num_unread: int = 0) -> None:
        """Publish parts of the first `num_pages` pages; by default, of the full pages that may be published.

        `num_unread`: computed tokens whose ids are not known yet.
        """
        if num_pages is None:
            num_pages = (known.computed - num_unread) // self._page_size
            if not self._names_private:
                num_pages = min(num_pages, known.content.num_known_pages)
        num_pages -= num_pages % self._ledger.hit_pages
        if num_pages <= known.num_named:
            return
        for index, parts in enumerate(known.parts):
            group = self._ledger.groups[index]
            if not group.is_state:
                for page in range(known.num_named, num_pages):
                    if page in parts and self._retains(known, index, page):
                        self.publish(known, index, page, parts[page])
        known.num_named = num_pages

    def _retains(self, known: KnownRequest, group: int, page: int) -> bool:
        end = (known.content.num_prompt_tokens - 1) // self._page_size
        ends = end - end % self._ledger.hit_pages, known.junction
        return self._ledger.groups[group].retains(page, ends, self._page_size)

    def arrive(self, known: KnownRequest, group: int, page: int, part: LedgerPart) -> None:
        """Publish a part that a load has filled, if its group retains it."""
        if self._retains(known, group, page):
            part.stays = True
            self.publish(known, group, page, part)

    def publish(self, known: KnownRequest, group: int, page: int, part: LedgerPart) -> None:
        """Publish a part under the digest of its page."""
        size = self._ledger.groups[group].block_pages
        digest = self._digests.of(known.content, page, size)
        self._digests.where.setdefault(digest, (known.content.owner, page))
        is_known = page < known.content.num_known_pages
        before = self._digests.of(known.content, page - 1, size) if page else None
        self._ledger.publish(part, digest, before=before, is_known=is_known)

    def _keep_tails(self, known: KnownRequest, num_before: int = 0) -> None:
        """Keep the parts that the token after the last page that can be found sees, or `num_before` pages before."""
        full_tokens = (known.num_named - num_before) * self._page_size
        for index, group in enumerate(self._ledger.groups):
            if group.is_bounded:
                for page in chain(*group.needed(full_tokens, self._page_size)):
                    if page in known.parts[index]:
                        known.parts[index][page].stays = True

    def _take_snapshots(self, known: KnownRequest) -> None:
        """Copy the states at the end of a page where no such copy can be found, if all copies fit."""
        page = known.computed // self._page_size - 1
        digest = self._digests.of(known.content, page)
        groups = self._ledger.groups
        missing = [
            index for index, group in enumerate(groups) if group.is_state and self._ledger.find(index, digest) is None
        ]
        if sum(groups[index].part_blocks for index in missing) > self._ledger.num_free:
            return
        for index in missing:
            part = self._ledger.take(index)
            assert part is not None, "all of them fit"
            self.publish(known, index, page, part)
            self._ledger.release(part)

    def draft(self, known: KnownRequest, event: DraftTaken, *, is_decoding: bool) -> None:
        """Take the parts for drafted tokens, which follow the token that the decode computes in this step."""
        if not is_decoding or known.drafted or event.start != known.computed or event.end <= event.start:
            what = f"drafts tokens {event.start} to {event.end}, and had {known.computed} computed"
            self._found.add(what, event.request, event.start // self._page_size)
        known.drafted = event.end - event.start
        self._drafting.append(known)
        self.take_pages(known, event.end)

    def judge(self, known: KnownRequest, event: DraftJudged) -> None:
        """Count accepted tokens, and release the parts of pages that hold only rejected ones."""
        if event.num_drafted != known.drafted or not 0 <= event.num_accepted <= known.drafted:
            what = f"accepts {event.num_accepted} of {event.num_drafted} tokens, and {known.drafted} were drafted"
            self._found.add(what, event.request)
        known.drafted = 0
        self._drafting = [other for other in self._drafting if other is not known]
        known.computed += event.num_accepted
        known.known += event.num_accepted
        num_pages = max(known.num_named, -(-known.computed // self._page_size))
        for parts in known.parts:
            for page in range(known.num_taken - 1, num_pages - 1, -1):
                if page in parts:
                    self._ledger.release(parts.pop(page))
        known.num_taken = min(known.num_taken, num_pages)
        self.name(known)

    def end_drafts(self) -> None:
        """Report running requests with a draft of an earlier step."""
        drafting, self._drafting = self._drafting, []
        for known in drafting:
            if known.is_running:
                self._found.add("has a draft of an earlier step, which was not judged", known.content.owner)
            known.drafted = 0

    def close(self, known: KnownRequest, *, num_unread: int = 0, keeps_state: bool = False) -> None:
        """Release all parts of a request, group by group: the state, then pages from the last to the first.

        `num_unread`: as for `name`. `keeps_state`: its state can be found after its last full page.
        """
        self.name(known, (known.computed - num_unread) // self._page_size)
        self._keep_tails(known)
        if keeps_state:
            self._keep_state(known)
        for index, parts in enumerate(known.parts):
            if index in known.states:
                self._ledger.release(known.states.pop(index))
            for page in sorted(parts, reverse=True):
                self._ledger.release(parts.pop(page))
        known.num_named = known.num_taken = 0
        known.is_running = False

    def _keep_state(self, known: KnownRequest) -> None:
        """Publish the states of a request in place of snapshots at its last full page, if there are none."""
        page = known.computed // self._page_size - 1
        digest = self._digests.of(known.content, page)
        snapshots = [self._ledger.find(index, digest) for index in known.states]
        known.swapped = known.computed if not any(snapshots) else (page + 1) * self._page_size
        for index, snapshot in zip(list(known.states), snapshots, strict=True):
            if snapshot is not None:
                snapshot.stays = True
            elif not any(snapshots):
                part = known.parts[index][page] = known.states.pop(index)
                self.publish(known, index, page, part)

    def resume(self, known: KnownRequest) -> None:
        """Begin after the tokens of a kept state, if it was found, and drop it: it is of fewer than there will be."""
        swapped, known.swapped, known.resumed = known.swapped, 0, 0
        if not swapped:
            return
        num_pages = swapped // self._page_size
        if num_pages == known.num_named:
            known.computed = known.resumed = swapped
        digest = self._digests.of(known.content, num_pages - 1)
        for index, group in enumerate(self._ledger.groups):
            if group.is_state and (part := self._ledger.find(index, digest)) is not None:
                self._ledger.drop(part)

    def look_at(self, known: KnownRequest, since: int) -> None:
        """Report parts that a running request holds though no token from `since` on sees them.

        States are compared with the tokens from its last step on.
        """
        began = known.began
        if began == known.resumed:
            # It holds what tokens from the page end on see at which its state was found.
            began -= began % self._page_size
            since = min(since, began)
        for index, group in enumerate(self._ledger.groups):
            if group.has_every_page:
                continue
            sink, others = group.needed(began if group.is_state else since, self._page_size)
            for page in known.parts[index]:
                if page in others or (group.is_bounded and page >= others.start):
                    break  # pages are in order
                if page not in sink:
                    what = f"is held{self._ledger.words(index)}, and no later token sees it"
                    self._found.add(what, known.content.owner, page)
                    break
