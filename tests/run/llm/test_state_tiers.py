"""L6 with layers that keep a state and host memory below: snapshots go there and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig

from builders.real_models import VOCABULARY, Ids, engine_of, exchange_loads, serve_at_random, undisturbed
from builders.stateful_models import FAMILIES, state_pages, stateful_pairs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BRIEF = SamplingParams(max_tokens=6, ignore_eos=True)
CASES = [(family, policy) for family in FAMILIES for policy in ("eager", "lazy")]
FEW = [("qwen3_next", "eager"), ("lfm2", "lazy")]


@pytest.fixture(scope="module")
def stateful() -> Callable[[str], tuple[Any, Any]]:
    return stateful_pairs()


def conversations() -> list[Ids]:
    """Turns of three conversations: each goes on from what was asked before."""
    random = Random(3)
    asked: list[Ids] = []
    for length in (22, 13, 30):
        first = [random.randrange(VOCABULARY) for _ in range(length)]
        second = [*first, *(random.randrange(VOCABULARY) for _ in range(9))]
        asked += [first, second, [*second, 1, 2, 3, 4, 5]]
    return asked


@pytest.mark.parametrize(
    ("family", "policy"),
    [pytest.param(*case, marks=[] if case in FEW else pytest.mark.long) for case in CASES],
)
def test_snapshots_that_went_through_host_memory_say_the_same(
    stateful: Callable[[str], tuple[Any, Any]], family: str, policy: Any
) -> None:
    """L6: a device with room for one sequence and little else; what is gone on from comes from host memory."""
    model, reference = stateful(family)
    asked = conversations()
    expected = [undisturbed(reference, prompt, BRIEF.max_tokens) for prompt in asked]
    offload = OffloadConfig(host_pages=2000, policy=policy)
    engine = engine_of(model, num_pages=16 + 3 * state_pages(model), budget=16, kv_groups="all", offload=offload)
    for order in (asked, asked[::-1]):
        for prompt in order:
            assert list(engine.generate([prompt], BRIEF)[0].tokens) == expected[asked.index(prompt)]
            engine.check()
    for completion, tokens in zip(engine.generate(asked, BRIEF), expected, strict=True):
        assert list(completion.tokens) == tokens
    counts = engine.transfers[0].counts
    assert counts["num_loaded_parts_group1"] > 5 and not counts["num_failed"]
    assert engine.kv_live_bytes() == 0
    engine.check()


def test_snapshots_that_went_through_files_say_the_same(
    stateful: Callable[[str], tuple[Any, Any]], tmp_path: Path
) -> None:
    """L6, also in a second engine, which finds the files of the first."""
    model, reference = stateful("qwen3_next")
    asked = conversations()
    expected = [undisturbed(reference, prompt, BRIEF.max_tokens) for prompt in asked]
    for _ in range(2):
        engine = engine_of(
            model,
            num_pages=16 + 3 * state_pages(model),
            budget=16,
            kv_groups="all",
            offload=OffloadConfig(host_pages=4 * state_pages(model), disk_pages=2000),
            disk_path=tmp_path,
        )
        for prompt in (*asked[:6], asked[2]):
            assert list(engine.generate([prompt], BRIEF)[0].tokens) == expected[asked.index(prompt)]
        engine.check()
        assert engine.transfers[0].num_bytes["disk_read"] and not engine.transfers[0].counts["num_failed"]


def test_a_snapshot_with_its_blocks_exchanged_breaks_it(
    stateful: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a load brings the blocks of a state in another order."""
    model, reference = stateful("qwen3_next")
    assert state_pages(model) > 1
    asked = conversations()
    turns = [*asked, asked[2]]

    def last_said() -> Ids:
        offload = OffloadConfig(host_pages=2000)
        engine = engine_of(model, num_pages=16 + 3 * state_pages(model), budget=16, kv_groups="all", offload=offload)
        said = [list(engine.generate([prompt], BRIEF)[0].tokens) for prompt in turns]
        assert engine.transfers[0].counts["num_loads"]
        return said[-1]

    expected = undisturbed(reference, asked[2], BRIEF.max_tokens)
    assert last_said() == expected
    exchange_loads(monkeypatch)
    assert last_said() != expected


@pytest.mark.laws
@settings(max_examples=3)
@given(seed=st.integers(0, 1 << 30), family=st.sampled_from(sorted(FAMILIES)))
def test_requests_come_and_go_at_any_time(stateful: Callable[[str], tuple[Any, Any]], seed: int, family: str) -> None:
    """L2, L6, L8: random arrivals, cancels while loads are under way, and the laws of accounting after every step."""
    model, reference = stateful(family)
    random = Random(seed)
    asked_for = conversations()
    policy: Any = random.choice(["eager", "lazy"])
    engine = engine_of(
        model,
        num_pages=random.choice([14, 20]) + random.choice([2, 3]) * state_pages(model),
        budget=random.choice([5, 16, 256]),
        seqs=random.choice([1, 3, 6]),
        kv_groups="all",
        offload=OffloadConfig(host_pages=random.choice([2 * state_pages(model), 2000]), policy=policy),
    )
    for prompt, completion in serve_at_random(engine, random, lambda: random.choice(asked_for), BRIEF, rate=0.3):
        if completion.finish_reason != "cancelled":
            assert list(completion.tokens) == undisturbed(reference, prompt, BRIEF.max_tokens)
