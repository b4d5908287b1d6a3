"""Live engines of KV groups, on an executor that writes down what every block holds and looks at all that is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvarts.core.build import PrepareTiers
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.engine import Engine
from kvarts.core.event_log import EventReader
from kvarts.core.events import StepDone
from kvarts.core.kv.groups import GroupMemory, PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.transfer import Direction, Move, TransferReport
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.drafts import Drafter
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.proof.audit.opening import open_audit

from builders.engines import engine_with
from oracles.naive import NaiveRequest
from oracles.naive_group_engine import NaiveGroupEngine
from oracles.naive_kv_groups import seen_by

STEP_NS = 1_000_000
MOST_IDLE = 1000
"""More steps than any workload waits for a transfer."""


FULL = KvLayer(kind="full", num_heads=1, head_numbers=2)
STATE = KvLayer(kind="state", state_bytes=1)


def window(span: int) -> KvLayer:
    """A layer that sees so many tokens."""
    return KvLayer(kind="window", num_heads=1, head_numbers=2, span=span)


@st.composite
def live_groups(draw: st.DrawFn) -> tuple[PartGroup, ...]:
    """Full layers, most often, and up to two windows; parts of one to six blocks."""
    sizes = st.sampled_from([1, 1, 2, 4, 6])
    groups = [PartGroup(FULL, draw(sizes))] if draw(st.integers(0, 4)) else []
    spans = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=0 if groups else 1, max_size=2))
    return (*groups, *(PartGroup(window(span), draw(sizes)) for span in spans))


def with_outputs(requests: Sequence[NaiveRequest]) -> Sequence[NaiveRequest]:
    """The requests; what they generate is known, and most often no other request's."""
    own = count(1000)
    for request in requests:
        if request.output is None:
            request.output = tuple(next(own) for _ in range(request.num_output))
    return requests


class Steps:
    """Keeps every step."""

    wants_details = False

    def __init__(self) -> None:
        self.done: list[StepDone] = []

    def observe(self, events: Sequence[Any]) -> None:
        self.done += [event for event in events if isinstance(event, StepDone)]


class ReadingExecutor:
    """Samples the tokens that are given, and computes nothing: what a slot of a block holds is the tokens before it.

    Whatever the layers of a group attend to is looked up, token by token, through the page tables of the plans. A state
    is all tokens so far, and fills every slot of its blocks: it is looked up before a token is added to it, and after
    everything that the step writes.
    """

    needs_page_ids = True

    def __init__(self, memory: GroupMemory, config: EngineConfig, tokens: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """`tokens`: for each request its tenant, and its prompt with all that it is to generate."""
        self.tokens = tokens
        self.config = config
        self.layers: list[KvLayer] = []
        """Those that each page table is for."""
        self.num_state_blocks = 0
        for group in memory.groups:
            if group.is_state:
                self.num_state_blocks += group.part_bytes // memory.block_bytes
                continue
            self.layers += [group.layer] * (group.part_bytes // memory.block_bytes)
        self.held: dict[tuple[int, int], tuple[Any, ...]] = {}
        """By block and place in the page: the page table, the tenant, and all tokens up to this one."""
        self.rows: dict[int, tuple[int, list[list[int]]]] = {}
        """By row: the request, and its page tables."""
        self.states: dict[int, tuple[int, ...]] = {}
        """By row: the blocks of its state."""
        self.num_snapshots = 0
        self.num_begun_from_snapshots = 0
        self.below: dict[tuple[int, int], tuple[Any, ...]] = {}
        """The same of the blocks of host memory."""
        self.files: dict[bytes, list[tuple[Any, ...]]] = {}
        """By key of a file, what each of its slots holds."""
        self.loses = 0
        """One in so many files is lost; 0: none is."""
        self.num_written = 0
        self.num_loads_of_files = 0
        self.num_looked_at = 0
        self.moved: list[TransferReport] = []
        """Reports on transfers that were carried out, and are said with the next step."""
        self.delays_reports = False
        """Whether a transfer is reported a step after it was carried out."""
        self.loads_wrong = False
        """Whether what is loaded first and last of a transfer is exchanged."""
        self.num_loads = 0

    def move(self, plan: StepPlan) -> tuple[TransferReport, ...]:
        """Carry out the transfers of a step; return the reports that are due."""
        reports, self.moved = self.moved, []
        for transfer in plan.transfers:
            self.num_loads += transfer.direction is Direction.LOAD
            for key in transfer.dropped_keys:
                self.files.pop(key, None)
            num_good = 0
            for move in transfer.moves:
                num_moved = self._move(transfer.direction, move)
                num_good += num_moved
                if num_moved < len(move.source_ids):
                    break
            is_whole = num_good == transfer.num_pages
            # Next to no time, so that loads pay.
            self.moved.append(
                TransferReport(transfer.transfer_id, num_good_pages=None if is_whole else num_good, duration_ns=1)
            )
        if not self.delays_reports:
            reports, self.moved = reports + self.moved, []
        return tuple(reports)

    def _move(self, direction: Direction, move: Move) -> int:
        """Copy blocks; return how many."""
        source, target = self.held, self.below
        if direction is Direction.LOAD:
            source, target = target, source
        source_ids, places = list(move.source_ids), range(self.config.page_size)
        if self.loads_wrong and direction is Direction.LOAD:
            source_ids.reverse()
        num_moved = 0
        of_file: list[tuple[Any, ...]] = []
        for source_id, target_id in zip(source_ids, move.target_ids, strict=True):
            if isinstance(target_id, bytes):
                assert direction is Direction.SPILL and isinstance(source_id, int)
                if num_moved and move.target_ids[num_moved - 1] == target_id:
                    of_file = self.files.get(target_id, [])
                else:
                    self.num_written += 1
                    of_file = []
                    if not self.loses or self.num_written % self.loses:
                        self.files[target_id] = of_file
                of_file += [self.below[source_id, place] for place in places]
            elif isinstance(source_id, bytes):
                assert direction is Direction.LOAD
                if num_moved == 0 or source_ids[num_moved - 1] != source_id:
                    if source_id not in self.files:
                        return num_moved
                    of_file = self.files[source_id].copy()
                    self.num_loads_of_files += 1
                for place in places:
                    self.held[target_id, place] = of_file.pop(0)
            else:
                assert direction is not Direction.SPILL
                for place in places:
                    target[target_id, place] = source[source_id, place]
            num_moved += 1
        return num_moved

    def execute(self, plan: StepPlan) -> StepResult:
        reports = self.move(plan)
        computed: list[tuple[int, int, int, list[int]]] = []
        guessed: dict[int, list[int]] = {}
        accepted: list[tuple[int, int]] = []
        if plan.drafts is not None:
            for row, token in zip(plan.drafts.rows.tolist(), plan.drafts.tokens.tolist(), strict=True):
                guessed.setdefault(row, []).append(token)
        sampled = np.zeros(self.config.max_num_seqs, np.uint64)
        if plan.decodes is not None:
            for row, page, blocks in plan.decodes.new_blocks:
                for table, taken in zip(self.rows[row][1], blocks, strict=True):
                    assert len(table) >= page, "a page is missing"
                    table[page:] = [taken]  # what was there, only rejected guesses were in
            of = plan.decodes
            for row, position, token in zip(of.rows.tolist(), of.positions.tolist(), of.tokens.tolist(), strict=True):
                request, _ = self.rows[row]
                assert self.tokens[request][1][position] == token
                guesses = guessed.get(row, [])
                computed.append((row, position, position + 1, guesses))
                said = self.tokens[request][1][position + 1 :]
                right = 0
                while right < len(guesses) and guesses[right] == said[right]:
                    right += 1
                sampled[row] = said[right]
                if right:
                    accepted.append((row, right))
        for chunk in plan.batch.chunks:
            assert len(chunk.tables) == len(self.layers)
            self.rows[chunk.row] = chunk.request_index, [list(map(int, table.page_ids)) for table in chunk.tables]
            tokens = self.tokens[chunk.request_index][1]
            assert tokens[chunk.start : chunk.end] == chunk.tokens.tolist()
            computed.append((chunk.row, chunk.start, chunk.end, []))
            if chunk.is_last:
                sampled[chunk.row] = tokens[chunk.end]
        for row, start, end, guesses in computed:
            for position in range(start, end + len(guesses)):
                for number, (block, place) in enumerate(self._slots(row, position)):
                    self.held[block, place] = self._content(number, row, position, end, guesses)
        if self.num_state_blocks:
            self._keep_states(plan, dict(accepted))
        for row, start, end, guesses in computed:
            for position in range(start, end + len(guesses)):
                self._read(row, position, end, guesses)
        return StepResult(STEP_NS, sampled, transfer_reports=reports, accepted=tuple(accepted))

    def _keep_states(self, plan: StepPlan, accepted: dict[int, int]) -> None:
        """Read and write the states of decodes, then of chunk after chunk, and look whether all of them stay.

        `accepted`: by row, how many guesses were right, after which its state is.
        """
        written: dict[tuple[int, ...], tuple[int, int]] = {}
        if plan.decodes is not None:
            of = plan.decodes
            for row, position in zip(of.rows.tolist(), of.positions.tolist(), strict=True):
                self._read_state(self.states[row], row, position)
                end = position + 1 + accepted.get(row, 0)
                self._write_state(self.states[row], row, end)
                written[self.states[row]] = row, end
        snapshots = list(plan.snapshots)
        self.num_snapshots += len(snapshots)
        for chunk in plan.batch.chunks:
            state, begins_from = tuple(map(int, chunk.state)), tuple(map(int, chunk.begins_from))
            assert len(state) == self.num_state_blocks and bool(begins_from) == bool(chunk.start)
            if begins_from:
                self._read_state(begins_from, chunk.row, chunk.start)
                self.num_begun_from_snapshots += begins_from != state
            at = chunk.start
            for snapshot in [each for each in snapshots if each.row == chunk.row]:
                snapshots.remove(snapshot)
                assert at < snapshot.num_tokens <= chunk.end, "a snapshot is out of order"
                at = snapshot.num_tokens
                assert not snapshot.num_tokens % self.config.page_size
                self._write_state(snapshot.blocks, chunk.row, snapshot.num_tokens)
                written[snapshot.blocks] = chunk.row, snapshot.num_tokens
            self._write_state(state, chunk.row, chunk.end)
            self.states[chunk.row] = state
            written[state] = chunk.row, chunk.end
        assert not snapshots, "a snapshot is of no chunk"
        for blocks, (row, num_tokens) in written.items():
            self._read_state(blocks, row, num_tokens)

    def _state_slots(self, blocks: Sequence[int], row: int, num_tokens: int) -> dict[tuple[int, int], tuple[Any, ...]]:
        tenant, tokens = self.tokens[self.rows[row][0]]
        return {
            (block, place): ("state", number, tenant, tuple(tokens[:num_tokens]))
            for number, block in enumerate(blocks)
            for place in range(self.config.page_size)
        }

    def _write_state(self, blocks: Sequence[int], row: int, num_tokens: int) -> None:
        self.held.update(self._state_slots(blocks, row, num_tokens))

    def _read_state(self, blocks: Sequence[int], row: int, num_tokens: int) -> None:
        for slot, content in self._state_slots(blocks, row, num_tokens).items():
            assert self.held[slot] == content, f"the state after {num_tokens} tokens of row {row} is another"

    def _slots(self, row: int, position: int) -> list[tuple[int, int]]:
        page, place = position // self.config.page_size, position % self.config.page_size
        return [(table[page], place) for table in self.rows[row][1]]

    def _content(self, number: int, row: int, position: int, end: int, guesses: Sequence[int]) -> tuple[Any, ...]:
        """What a slot holds; the tokens of `row` from `end` on are guesses."""
        tenant, tokens = self.tokens[self.rows[row][0]]
        return number, tenant, (*tokens[: min(end, position + 1)], *guesses[: max(0, position + 1 - end)])

    def _read(self, row: int, position: int, end: int, guesses: Sequence[int]) -> None:
        """Look at all that a token attends to, in the layers of each page table."""
        for number, layer in enumerate(self.layers):
            for other in seen_by(layer, position):
                slot = self._slots(row, other)[number]
                assert self.held[slot] == self._content(number, row, other, end, guesses), (
                    f"token {position} of request {self.rows[row][0]} attends to {other}, and its block holds another"
                )
                self.num_looked_at += 1


class LiveRun:
    """What became of requests, and of every step."""

    def __init__(
        self,
        requests: Sequence[NaiveRequest],
        memory: GroupMemory,
        config: EngineConfig,
        num_blocks: int,
        *,
        tiers: PrepareTiers | None = None,
        drafter: Drafter | None = None,
        num_draft_slots: int = 0,
        readers: Sequence[EventReader] = (),
    ) -> None:
        """`requests`: of the naive engine, with all that they generate. `drafter`: guesses what that is.

        `num_draft_slots`: guesses come first, with up to so many tokens.
        """
        self.steps = Steps()
        self.tokens: list[tuple[Any, list[int]]] = []
        for request in requests:
            assert request.output is not None
            self.tokens.append((request.tenant, [int(str(token)) for token in (*request.tokens, *request.output)]))
        self.executor = ReadingExecutor(memory, config, self.tokens)
        self.engine: Engine = engine_with(
            config,
            self.executor,
            memory=memory,
            num_blocks=num_blocks,
            readers=[self.steps, *readers],
            audit="laws" if num_draft_slots else open_audit,
            tiers=tiers,
            drafter=drafter,
            num_draft_slots=num_draft_slots,
        )
        self.requests = [self._request(request, config) for request in requests]

    def _request(self, request: NaiveRequest, config: EngineConfig) -> Request:
        tenant, tokens = self.tokens[request.seq]
        num_prompt = len(request.tokens)
        content = Content.from_tokens(tokens[:num_prompt], page_size=config.page_size, owner=request.seq, salt=tenant)
        return Request(
            request.seq,
            content,
            num_prompt_tokens=num_prompt,
            max_tokens=request.num_output,
            arrival_ns=request.arrival_ns,
            priority=request.priority,
        )

    def run(self, between_steps: Callable[[], None] = lambda: None) -> None:
        """Run all, each from its arrival on."""
        engine = self.engine
        waiting = sorted(self.requests, key=lambda request: request.arrival_ns)
        now_ns = num_idle = 0
        while waiting or engine.has_work:
            while waiting and waiting[0].arrival_ns <= now_ns:
                engine.submit(waiting.pop(0), now_ns)
            if engine.has_work:
                engine.step(now_ns)
                num_idle = 0 if engine.batch.num_decodes or engine.batch.chunks else num_idle + 1
                assert num_idle < MOST_IDLE, "L8: there is work, and no step computes anything"
                now_ns = engine.now_ns
                between_steps()
            else:
                now_ns = waiting[0].arrival_ns if waiting else now_ns
        assert all(request.state in (RequestState.FINISHED, RequestState.REJECTED) for request in self.requests)


def assert_as_naive(live: LiveRun, requests: Sequence[NaiveRequest], naive: NaiveGroupEngine, block_bytes: int) -> None:
    """When requests run and what they find, and used and cached parts of every group at every step."""
    for request, expected in zip(live.requests, requests, strict=True):
        assert (request.state is RequestState.REJECTED) == expected.rejected
        if not expected.rejected:
            assert request.first_admitted_ns == expected.first_admitted_ns
            assert request.last_token_ns == expected.last_token_ns
            assert request.cached_tokens == expected.others_hit_tokens
            assert request.num_preemptions == expected.preemptions
    assert len(live.steps.done) == len(naive.steps)
    for step, expected_step, counts in zip(live.steps.done, naive.steps, naive.counts, strict=True):
        assert step.start_ns == expected_step.start_ns
        assert step.num_used * block_bytes == expected_step.used
        assert step.num_cached * block_bytes == expected_step.cached
        assert step.tiers == counts
        assert (step.num_running, step.num_waiting) == (expected_step.running, expected_step.waiting)
        assert len(step.preemptions) == expected_step.preempted
