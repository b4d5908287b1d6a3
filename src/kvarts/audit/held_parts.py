"""What requests hold of parts, as the audit has it: what they take, let be found, keep for others, and release."""

from __future__ import annotations

from itertools import chain

from kvarts.audit.digests import PageDigests
from kvarts.audit.finding import Findings
from kvarts.audit.part_ledger import AuditedPart, PartLedger
from kvarts.content import Content
from kvarts.events import DraftJudged, DraftTaken

__all__ = ["HeldParts", "PartHolder"]


class PartHolder:
    """What the auditor knows of one request. Its first `num_named` pages can be found, as far as it has parts of them.

    `parts`: by group and page; `states`: by group. `drafted`: tokens that were drafted for it in this step.
    """

    __slots__ = ("computed", "content", "drafted", "is_running", "known", "num_named", "parts", "states")

    def __init__(self, content: Content, prompt: int, num_groups: int) -> None:
        self.content = content
        self.known = prompt
        self.computed = self.num_named = self.drafted = 0
        self.parts: list[dict[int, AuditedPart]] = [{} for _ in range(num_groups)]
        self.states: dict[int, AuditedPart] = {}
        self.is_running = False


class HeldParts:
    """Moves parts in `ledger` for requests. `found` receives what does not add up."""

    def __init__(self, ledger: PartLedger, digests: PageDigests, found: Findings, page_size: int) -> None:
        self._ledger = ledger
        self._digests = digests
        self._found = found
        self._page_size = page_size

    def grow(self, known: PartHolder, num_tokens: int, *, is_end: bool) -> None:
        """Take what tokens up to there need, and let what they fill be found. `is_end`: of the known tokens."""
        self.take_pages(known, num_tokens)
        known.computed = num_tokens
        self.name(known)
        if is_end:
            self._keep_tails(known)
            if num_tokens % self._page_size == 0:
                self._take_snapshots(known)

    def take_pages(self, known: PartHolder, num_tokens: int) -> None:
        """Take what tokens up to there need, beside what the request has."""
        pages = range(-(-known.computed // self._page_size), -(-num_tokens // self._page_size))
        for index, group in enumerate(self._ledger.groups):
            if group.kind != "state":
                for page in pages:
                    part = self._take(known, index, page)
                    if part is not None:
                        known.parts[index][page] = part
            elif index not in known.states:
                part = self._take(known, index, pages.start)
                if part is not None:
                    known.states[index] = part

    def _take(self, known: PartHolder, group: int, page: int) -> AuditedPart | None:
        part = self._ledger.take(group)
        if part is None:
            self._found.add(
                f"a part in {self._ledger.name(group)} was taken where none is free", known.content.owner, page
            )
        return part

    def name(self, known: PartHolder) -> None:
        """Let parts of full pages be found."""
        end = known.computed // self._page_size
        for index, parts in enumerate(known.parts):
            if self._ledger.groups[index].kind == "state":
                continue
            for page in range(known.num_named, end):
                if page in parts:
                    self.publish(known, index, page, parts[page])
        known.num_named = max(known.num_named, end)

    def publish(self, known: PartHolder, group: int, page: int, part: AuditedPart) -> None:
        """Let a part be found."""
        digest = self._digests.of(known.content, page)
        self._digests.where.setdefault(digest, (known.content.owner, page))
        if self._ledger.publish(part, digest):
            self._ledger.happened.append(("stored", group, digest, None))

    def _keep_tails(self, known: PartHolder) -> None:
        """Keep what the token after the last full page sees."""
        full_tokens = known.computed // self._page_size * self._page_size
        for index, group in enumerate(self._ledger.groups):
            if group.is_bounded:
                for page in chain(*group.needed(full_tokens, self._page_size)):
                    if page in known.parts[index]:
                        known.parts[index][page].is_kept = True

    def _take_snapshots(self, known: PartHolder) -> None:
        """Copy the states at the end of a page, as far as no such copies can be found, if all of them fit."""
        page = known.computed // self._page_size - 1
        digest = self._digests.of(known.content, page)
        groups = self._ledger.groups
        missing = [
            index for index, group in enumerate(groups) if group.kind == "state" and not self._ledger.has(index, digest)
        ]
        if sum(groups[index].part_blocks for index in missing) > self._ledger.num_free:
            return
        for index in missing:
            part = self._ledger.take(index)
            assert part is not None, "all of them fit"
            self.publish(known, index, page, part)
            self._ledger.release(part)

    def draft(self, known: PartHolder, event: DraftTaken, *, is_decoding: bool) -> None:
        """Take what drafted tokens need, which follow the one that the decode computes in this step."""
        if not is_decoding or known.drafted or event.start != known.computed or event.end <= event.start:
            what = f"drafts tokens {event.start} to {event.end}, and had {known.computed} computed"
            self._found.add(what, event.request, event.start // self._page_size)
        known.drafted = event.end - event.start
        self.take_pages(known, event.end)

    def judge(self, known: PartHolder, event: DraftJudged) -> None:
        """Count accepted tokens, and give back the parts of pages that only others were in."""
        if event.num_drafted != known.drafted or not 0 <= event.num_accepted <= known.drafted:
            what = f"accepts {event.num_accepted} of {event.num_drafted} tokens, and {known.drafted} were drafted"
            self._found.add(what, event.request)
        known.drafted = 0
        known.computed += event.num_accepted
        known.known += event.num_accepted
        num_pages = -(-known.computed // self._page_size)
        for parts in known.parts:
            for page in sorted((page for page in parts if page >= num_pages), reverse=True):
                self._ledger.release(parts.pop(page))
        self.name(known)

    def close(self, known: PartHolder) -> None:
        """Release all that a request holds, group by group, its state and then the last page first."""
        self._keep_tails(known)
        for index, parts in enumerate(known.parts):
            if index in known.states:
                self._ledger.release(known.states.pop(index))
            for page in sorted(parts, reverse=True):
                self._ledger.release(parts.pop(page))
        known.num_named = 0
        known.is_running = False

    def look_at(self, known: PartHolder) -> None:
        """Find what a running request holds between two steps though no later token sees it, and drafts not judged."""
        if known.drafted:
            self._found.add("has a draft of an earlier step, which was not judged", known.content.owner)
            known.drafted = 0
        for index, group in enumerate(self._ledger.groups):
            if group.kind in ("full", "latent"):
                continue
            sink, others = group.needed(known.computed, self._page_size)
            for page in known.parts[index]:
                if page in others:
                    break  # pages are in order
                if page not in sink:
                    what = f"is held in {self._ledger.name(index)}, and no later token sees it"
                    self._found.add(what, known.content.owner, page)
                    break
