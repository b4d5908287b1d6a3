"""The naive engine with KV groups, whose decodes draft tokens before prompts are planned."""

from __future__ import annotations

from typing import Any

from oracles.naive import NaiveRequest, Page
from oracles.naive_drafts import DraftFn
from oracles.naive_group_engine import NaiveGroupEngine
from oracles.naive_grouped import has_state


class NaiveGroupDraftEngine(NaiveGroupEngine):
    """Decodes release at their turns, and what they have of the pages that accepted tokens fill is findable then."""

    def __init__(self, *given: Any, num_slots: int, drafts: DraftFn, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.num_slots = num_slots
        self.drafts = drafts
        self.planned: dict[int, int] = {}
        """Of whoever had its turn as a decode, how many drafted tokens will be right."""
        self.named: dict[int, int] = {}
        """How many pages of a request can be found."""
        self.has_prefills = self.has_running = False

    def settle_decodes(self) -> None:
        pass

    def num_drafted(self, request: NaiveRequest) -> int:
        if request.seq not in self.decoding:
            return 0
        num_drafted, self.planned[request.seq] = self.drafts(request.seq, request.made)
        return num_drafted

    def num_right(self, request: NaiveRequest) -> int:
        return self.planned.pop(request.seq, 0)

    def preempt(self, victim: NaiveRequest, asker: NaiveRequest, now_ns: int) -> None:
        self.planned.pop(victim.seq, None)
        super().preempt(victim, asker, now_ns)

    def missing(self, request: NaiveRequest, want: int) -> int:
        sequence, asked = self.sequences[request.seq], 0
        pages = {(request.computed + each) // self.page_size for each in range(want)}
        for group, (layer, part_bytes) in enumerate(self.layers):
            if has_state(layer):
                asked += part_bytes if group not in sequence.states else 0
            else:
                asked += part_bytes * len(pages - set(sequence.parts[group]))
        return asked

    def name_full(self, request: NaiveRequest, num_tokens: int) -> None:
        """What the first tokens fill can be found."""
        sequence = self.sequences[request.seq]
        sequence.tokens[:] = self.tokens_of(request, max(num_tokens, request.computed))
        for page in range(num_tokens // self.page_size):
            for group, (layer, _) in enumerate(self.layers):
                part = None if has_state(layer) else sequence.parts[group].get(page)
                if part is not None and part.name is None:
                    self.groups.publish(part, self.groups.name(sequence.tokens, sequence.salt, page))
        self.named[request.seq] = num_tokens // self.page_size

    def fill(self, request: NaiveRequest) -> None:
        self.count_computed(request, request.computed + 1)
        self.name_full(request, request.computed)
        self.sequences[request.seq].num_tokens = request.computed

    def compute_chunk(self, request: NaiveRequest, want: int) -> None:
        self.sequences[request.seq].num_tokens = request.computed
        super().compute_chunk(request, want)
        self.named[request.seq] = request.computed // self.page_size

    def release(self, request: NaiveRequest) -> None:
        self.decoding.discard(request.seq)
        self.continued.discard(request.seq)
        sequence = self.sequences.pop(request.seq)
        sequence.num_tokens = self.named.pop(request.seq) * self.page_size
        self.groups.close(sequence)

    def begin_admissions(self, before: dict[int, int]) -> None:
        self.has_running = bool(before)
        self.has_prefills = any(r.seq in before and r.seq not in self.decoding for r in self.running)

    def num_padded(self, head: NaiveRequest, hits: list[Page]) -> int:
        is_last = head.known - len(hits) * self.page_size == 1
        return self.num_slots if is_last and not self.has_prefills and (self.has_running or hits) else 0
