"""The journal, the stories told from it, and the hit ledger against one kept token by token."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given

from kvarts import ReplayConfig, replay
from kvarts.base.errors import InputError
from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.keys import BlockKeys
from kvarts.core.request import Request
from kvarts.proof.explain.hits import KINDS, hit_ledger
from kvarts.proof.explain.reading import Journal, load_journal
from kvarts.proof.explain.story import story_of_block, story_of_request
from kvarts.proof.explain.sums import longest_waits
from kvarts.proof.journal import DraftedLine, PreemptedLine, RemovedLine, StoredLine
from kvarts.proof.record.journal import JournalWriter
from kvarts.sim.traffic.mooncake import load_mooncake

from builders.case import Case, cases
from builders.engines import make_replica
from builders.guesser import Guesser
from builders.serving import Arrival, serve
from builders.toy_model import ToyExecutor
from builders.written import journals_of
from oracles.naive import polynomial_ns, run_naive
from oracles.naive_hits import RememberingEngine


def loaded(text: bytes, folder: Path) -> Journal:
    path = folder / "events.jsonl"
    path.write_bytes(text)
    return load_journal(path)


@pytest.mark.laws
@given(case=cases())
def test_every_prompt_token_has_the_fate_that_a_token_by_token_engine_gives_it(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """L7: counted once, and for the right reason."""
    requests = case.naive_requests()
    engines = [RememberingEngine(**case.sizes, profile=case.profile, cost=polynomial_ns) for _ in range(case.replicas)]
    run_naive(requests, engines)
    folder = tmp_path_factory.mktemp("journal")
    for engine, text in zip(engines, journals_of(case), strict=True):
        journal = loaded(text, folder)
        ledger = hit_ledger(journal)
        prompts = {request.seq: len(request.tokens) for request in requests}
        for seq, counted in engine.counts().items():
            account = ledger.by_request[seq]
            assert account == {kind: counted.get(kind, 0) for kind in KINDS}
            assert sum(account.values()) == prompts[seq]
        assert ledger.by_request.keys() == engine.counts().keys()
        assert sum(ledger.tokens.values()) == ledger.prompt_tokens
        assert (ledger.evicted_ago_ms is not None) >= (ledger.tokens["evicted"] > 0)
        for seq in ledger.by_request:
            assert story_of_request(journal, str(seq))[-1]
        for line in journal.lines:
            if isinstance(line, RemovedLine) and not line.is_copy:
                name = f"{journal.names[line.request]}:{line.end_page - 1}"
                story = story_of_block(journal, name)
                assert any(f"step {line.step} " in said and " evicted" in said for said in story)


# A run told by hand ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """Ten pages of four tokens, a step a millisecond: A, then B with A's prefix, then C, which has to give way."""
    file = io.BytesIO()
    writer = JournalWriter(file, total_blocks=10, block_size_tokens=4)
    config = EngineConfig(num_pages=10, page_size=4)
    engine = make_replica(config, readers=[writer], step_by_step=True)
    now_ns = 0

    def submit(index: int, name: str, text: str, num_output: int) -> None:
        content = Content.from_tokens([ord(letter) for letter in text], page_size=4, owner=index)
        engine.submit(
            Request(index, content, num_prompt_tokens=len(text), max_tokens=num_output, request_id=name), now_ns
        )

    def run(steps: int) -> None:
        nonlocal now_ns
        for _ in range(steps):
            if engine.has_work:
                now_ns = engine.start(now_ns)
                engine.finish()

    submit(0, "A", "You are helpful. Hi!", 6)
    run(1)
    submit(1, "B", "You are helpful. Bye", 20)
    run(5)
    submit(2, "C", "Lock it!", 20)
    submit(3, "D", "x" * 60, 20)
    run(100)
    submit(4, "E", "You are helpful. Hi! And now?", 2)
    run(100)
    return loaded(file.getvalue(), tmp_path_factory.mktemp("told"))


def test_the_story_of_a_request_names_every_cause(told: Journal) -> None:
    assert story_of_request(told, "B") == [
        "step 0               0.001 s  arrived: 20 prompt tokens (5 pages), up to 20 to make, with none ahead",
        "step 1               0.001 s  admitted after 0.0 ms: hit 16 tokens (4 pages, last touched by A)",
        "step 1               0.001 s  computes tokens 16 to 20 of 20, makes its first token",
        "step 20              0.021 s  finished: 20 tokens made, 20.0 ms after it arrived",
        "step 21              0.021 s  of its sequence, 5 pages between 4 and 8 evicted, until step 30",
    ]
    story = story_of_request(told, "C")
    preempted = next(line for line in told.lines if isinstance(line, PreemptedLine))
    assert preempted.request == 2
    expected = (
        f"step {preempted.step:<8} {preempted.t_ms / 1e3:>12,.3f} s  preempted by B, which asked for 1 page and was 1 "
        "short with 10 in use: lost 11 computed tokens, keeps 4 made"
    )
    assert expected in story
    assert any("admitted again after" in said and "of the 11 lost tokens again" in said for said in story)
    assert story[-1].endswith("s after it arrived") or "evicted" in story[-1]


def test_who_cannot_ever_run_is_told_why(told: Journal) -> None:
    (line,) = story_of_request(told, "D")
    assert line.endswith("rejected: needs 20 pages of 4 tokens for 60 prompt and 20 output tokens; the pool has 10")


def test_the_story_of_a_block(told: Journal) -> None:
    """Page 3 is A's, hit by B; page 4 is A's alone."""
    shared = story_of_block(told, "A:3")
    assert "page 3 of request A, and of 2 other requests; tokens 12 to 16" in shared[0]
    assert shared[1:5] == [
        "step 0               0.000 s  stored: A filled it",
        "step 1               0.001 s  hit by B; 2 hold it",
        "step 5               0.006 s  A finished; 1 hold it",
        "step 20              0.021 s  B finished; nothing holds it",
    ]
    own = story_of_block(told, "A:4")
    assert any("evicted after" in said and "idle, last touched by A" in said for said in own)
    assert own[-1].startswith("in the end it is")


def test_a_block_goes_by_its_key_too(told: Journal) -> None:
    key = BlockKeys(told.contents[0])[4].hex()
    by_key = story_of_block(told, key[:10])
    assert by_key[0].startswith(f"block {key}: page 4 of request ")
    assert by_key[1:] == story_of_block(told, "A:4")[1:] == story_of_block(told, f"0x{key.upper()}")[1:]


@pytest.mark.parametrize(
    ("name", "what"),
    [("A:99", "never had a page 99"), ("A:x", "names no page"), ("D:0", "names no page"), ("Z:1", "no request 'Z'"),
     ("abc", "names no block"), ("zzzzzzzz", "names no block"), ("00000000", "no block with a key that begins with")],
)  # fmt: skip
def test_what_is_no_block_is_refused(told: Journal, name: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        story_of_block(told, name)


def test_a_long_wait_says_what_was_missing() -> None:
    sample = Path(__file__).parents[3] / "src" / "kvarts" / "data" / "mooncake-conversation-1000.jsonl"
    file = io.BytesIO()
    writer = JournalWriter(file, total_blocks=700, block_size_tokens=512, is_packed=True)
    report = replay(load_mooncake(sample), ReplayConfig(num_pages=700, page_size=512), observers_of=lambda _: [writer])
    writer.close()
    journal = load_journal_from(gzip.decompress(file.getvalue()))
    waits = longest_waits(journal, 10)
    assert waits[0].waited_ms == pytest.approx(report.summary["queue_ms"]["max"])
    assert any("first in the queue and not admitted" in said for said in story_of_request(journal, waits[0].request))
    assert waits == sorted(waits, key=lambda wait: -wait.waited_ms)
    # Neighbours in one jam are told once.
    assert len({wait.request for wait in waits}) == len(waits) > 1
    assert waits[0].num_others > 10
    ledger = hit_ledger(journal)
    assert ledger.prompt_tokens == report.summary["num_input_tokens"]
    assert ledger.tokens["device_hit"] <= report.summary["num_cached_tokens"]
    assert ledger.tokens["recomputed"] <= report.summary["num_recomputed_tokens"]


def load_journal_from(text: bytes) -> Journal:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(text)
        file.flush()
        return load_journal(file.name)


def test_live_tokens_are_in_the_journal(tmp_path: Path) -> None:
    """What a model makes is known only when it is made; blocks of it have keys all the same."""
    file = io.BytesIO()
    writer = JournalWriter(file, total_blocks=64, block_size_tokens=4, is_live=True)
    config = EngineConfig(num_pages=64, page_size=4)
    executor = ToyExecutor(config.num_pages, config.page_size, config.max_num_seqs)
    serve([Arrival(0, [1, 0, 1], 14, 0, None), Arrival(3, [1, 0, 1], 9, 0, None)], config, executor, [writer])
    journal = loaded(file.getvalue(), tmp_path)
    stored = [line for line in journal.lines if isinstance(line, StoredLine)]
    assert any(line.end_page * 4 > journal.arrivals[line.request].prompt_tokens for line in stored)
    for line in stored:
        assert line.end_page <= journal.contents[line.request].num_known_pages


def test_guessed_tokens_are_in_the_journal_and_in_what_is_told_of_it(tmp_path: Path) -> None:
    """With drafts, a request makes several tokens a step; counted are those that were right."""
    file = io.BytesIO()
    writer = JournalWriter(file, total_blocks=20, block_size_tokens=2)
    config = EngineConfig(num_pages=20, page_size=2, max_num_batched_tokens=16, max_num_seqs=3)
    arrivals = [Arrival(index, [1, 0, 1, index], 12, 0, None) for index in range(4)]
    guesser = Guesser(0, wrong=0.3, most=4)
    _, requests, _ = serve(arrivals, config, ToyExecutor(20, 2, 3), [writer], drafter=guesser)
    journal = loaded(file.getvalue(), tmp_path)
    drafted = [line for line in journal.lines if isinstance(line, DraftedLine)]
    assert [(line.request, line.drafted, line.accepted) for line in drafted] == guesser.judged
    for request in requests:
        of_mine = [line for line in drafted if line.request == request.index]
        guessed, right = (sum(getattr(line, name) for line in of_mine) for name in ("drafted", "accepted"))
        (end,) = [said for said in story_of_request(journal, str(request.index)) if "finished: " in said]
        assert "12 tokens made" in end
        assert f"{right} of {guessed} drafted tokens were right" in end
    account = hit_ledger(journal).by_request
    for request in requests:
        found = account[request.index]["device_hit"] + account[request.index]["recomputed"]
        assert sum(account[request.index].values()) == 4 and found >= request.cached_tokens
