"""Law L16, plans of random layers: what holds of each, and the naive request; `equal.planning` has vLLM's plans."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equal.planning import Job, draw_job
from kvarts.cost.vllm.planning import LayerSpec, Plan, PlanSettings, plan

from oracles.naive_start import longest_length, most_blocks

pytestmark = pytest.mark.laws

SEEDS = st.integers(0, 10**9)
VERSIONS = st.sampled_from(("0.32", "0.33"))
FULL = LayerSpec(kind="full", block_size=16, num_heads=8, entry_bytes=512, cell="128 bfloat16")
WINDOW = msgspec.structs.replace(FULL, kind="window", window=128)
STATE = LayerSpec(kind="state", block_size=784, state_bytes=3_207_168, padded_bytes=3_211_264, is_sharded=False)


def planned(job: Job) -> Plan:
    return plan(job.ranks, job.available, job.settings)


def layers(*runs: tuple[LayerSpec, int]) -> dict[str, LayerSpec]:
    specs = [spec for spec, count in runs for _ in range(count)]
    return {str(index): spec for index, spec in enumerate(specs)}


def settings(**changes: object) -> PlanSettings:
    return msgspec.structs.replace(PlanSettings(max_model_len=8192, tokens_in_flight=16_384), **changes)


@given(seed=SEEDS, version=VERSIONS)
def test_a_plan_adds_up(seed: int, version: str) -> None:
    """Each layer is in one group, the blocks fill the memory, and the figures follow from them."""
    job = draw_job(seed, version)
    own = planned(job)
    assert own == planned(job)
    if own.num_blocks is None:
        assert own.refusal
        return
    names = [name for group in own.groups for name in group.layers]
    assert sorted(names) == sorted(job.ranks[0])
    assert own.max_concurrency is not None and own.max_model_len is not None and own.block_bytes is not None
    assert own.max_concurrency == own.num_blocks / sum(group.blocks_per_request for group in own.groups)
    assert own.kv_cache_tokens == int(own.max_concurrency * own.max_model_len)
    if job.settings.num_blocks_override is None:
        assert own.num_blocks * own.block_bytes <= job.available[0]
        if len(job.ranks) == 1:
            assert (own.num_blocks + 1) * own.block_bytes > job.available[0]
            assert own.num_blocks > sum(group.blocks_per_request for group in own.groups)  # one is the null block


@given(seed=SEEDS, version=VERSIONS, more=st.integers(1, 1 << 36))
def test_more_memory_never_gives_less(seed: int, version: str, more: int) -> None:
    job = draw_job(seed, version)
    own = planned(job)
    larger = planned(msgspec.structs.replace(job, available=[size + more for size in job.available]))
    if own.num_blocks is not None:
        assert larger.num_blocks is not None and larger.num_blocks >= own.num_blocks
        assert larger.groups == own.groups or job.settings.fits_length


@given(
    kind=st.sampled_from(("full", "window", "chunk")),
    block=st.sampled_from((16, 32, 64)),
    span=st.integers(1, 300),
    step=st.integers(1, 500),
    length=st.integers(1, 900),
    retained=st.integers(0, 3),
)
def test_blocks_of_a_request_are_those_it_holds(
    kind: str, block: int, span: int, step: int, length: int, retained: int
) -> None:
    """Never fewer than a request holds; windows and chunks at most two more, as their start in a block varies."""
    spans = {"window": span if kind == "window" else None, "chunk": span if kind == "chunk" else None}
    spec = msgspec.structs.replace(FULL, kind=kind, block_size=block, **spans)
    chosen = settings(max_model_len=length, tokens_in_flight=step, num_retained=retained)
    own = plan([{"0": spec}], [1 << 40], chosen)
    held = most_blocks(spec, length, chosen)
    if kind == "chunk":  # a step from inside a chunk may touch one block more than vLLM counts
        assert held - 1 <= own.groups[0].blocks_per_request <= held + -(-span // block) + 1
    elif kind == "window":
        assert held <= own.groups[0].blocks_per_request <= held + -(-min(span + step, length) // block) + 1
    else:
        assert own.groups[0].blocks_per_request == held


@given(memory=st.integers(1, 400), num_full=st.integers(1, 3), num_windows=st.integers(0, 3))
def test_the_longest_length_is_that_of_a_search_one_by_one(memory: int, num_full: int, num_windows: int) -> None:
    own = layers((FULL, num_full), (WINDOW, num_windows))
    size = plan([own], [1 << 40], settings(max_model_len=1)).block_bytes
    assert size is not None
    bounds = settings(max_model_len=400, tokens_in_flight=64)
    blocks = {
        length: sum(
            group.blocks_per_request
            for group in plan([own], [1 << 40], msgspec.structs.replace(bounds, max_model_len=length)).groups
        )
        for length in range(1, 401)
    }
    available = memory * size // 4
    fitted = plan([own], [available], msgspec.structs.replace(bounds, fits_length=True))
    assert (fitted.max_model_len or 0) == longest_length(400, size, available - size, blocks)


def test_refusals_are_vllms_words() -> None:
    one = layers((FULL, 4))
    assert "No available memory" in (plan([one], [0], settings()).refusal or "")
    short = plan([one], [64 << 20], settings(max_model_len=40_960))
    assert short.longest == 4080 and "the estimated maximum model length is 4080" in (short.refusal or "")
    assert "Cannot auto-fit" in (plan([one], [1000], settings(fits_length=True)).refusal or "")
    many = plan([layers((STATE, 3), (FULL, 1))], [4 << 30], settings(max_num_seqs=5000))
    assert many.num_blocks is not None and "exceeds available Mamba cache blocks" in (many.refusal or "")
    wide = layers((msgspec.structs.replace(FULL, window=100), 1), (msgspec.structs.replace(FULL, window=200), 1))
    assert "the same window size" in (plan([wide], [1 << 30], settings()).refusal or "")


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ((10, 52), [10, 9, 9, 9, 9, 8, 8]),  # Gemma 3: 52 windows in six groups
        ((13, 12), [13, 12]),  # within half as many more: two groups
        ((6, 23), [6, 6, 6, 6, 5]),  # Nemotron 3 Nano
    ],
)
def test_layers_are_dealt_into_groups(counts: tuple[int, int], sizes: list[int]) -> None:
    own = plan([layers((FULL, counts[0]), (WINDOW, counts[1]))], [40 << 30], settings())
    assert [len(group.layers) for group in own.groups] == sizes


def test_the_versions_differ_in_when_a_layout_is_refused() -> None:
    """0.33 looks at the layout before it looks at memory, 0.32 after."""
    padded = layers((msgspec.structs.replace(FULL, padded_bytes=FULL.page_bytes + 256), 3))
    for version, words in (("0.32", "No available memory"), ("0.33", "Page padding requires")):
        own = settings(version=version, layouts=("BHLNC",))
        assert words in (plan([padded], [0], own).refusal or "")
