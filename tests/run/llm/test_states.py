"""Real models with layers that keep a state: the same tokens, from snapshots as well, and the bytes as counted."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch

from kvarts.base.errors import ConfigError
from kvarts.core.sampling import SamplingParams
from kvarts.core.sched.group_batch import GroupBatch
from kvarts.core.sched.plan import Snapshot
from kvarts.cost.hardware.model_config import load_geometry
from kvarts.run.flat_batch import StateBatch, StateTables
from kvarts.run.torch.llm import LLM
from kvarts.run.torch.probe import examine
from kvarts.run.torch.room import KVRoom
from kvarts.run.torch.states import StateMemory, StateShape, StateTensor

from builders import real_models
from builders.real_models import GREEDY, PAGE_SIZE, VOCABULARY, Ids, engine_of, prompts_with_prefixes, serve_at_random
from builders.stateful_models import FAMILIES, state_pages, stateful_pairs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


SLOW = ("qwen3_next", "granitemoehybrid", "kimi_linear")
"""The families that take longest; where each one shows the same, theirs are long tests."""

_said: dict[tuple[int, tuple[int, ...], int], Ids] = {}


def undisturbed(reference: Any, prompt: Ids, num_tokens: int) -> Ids:
    """What transformers' generate says, once for each prompt."""
    key = id(reference), tuple(prompt), num_tokens
    if key not in _said:
        _said[key] = real_models.undisturbed(reference, prompt, num_tokens)
    return _said[key]


@pytest.fixture(scope="module")
def stateful() -> Callable[[str], tuple[Any, Any]]:
    return stateful_pairs()


def turns(seed: int = 1) -> list[Ids]:
    """Prompts as those of conversations: each turn goes on from what was asked before."""
    random = Random(seed)
    first = [random.randrange(VOCABULARY) for _ in range(22)]
    second = [*first, *(random.randrange(VOCABULARY) for _ in range(9))]
    return [first, second, [*second, 1, 2, 3, 4, 5, 6], [*second, 7, 8], first, [3, 4]]


# L6 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("snapshots", ["ends", "branches"])
@pytest.mark.parametrize(("num_pages", "budget"), [(256, 2048), (24, 7)])
def test_greedy_tokens_are_those_of_an_undisturbed_run(
    stateful: Callable[[str], tuple[Any, Any]], family: str, num_pages: int, budget: int, snapshots: Any
) -> None:
    """L6: whole prompts and chunks, prefixes gone on from at snapshots, and memory that is too small for all."""
    model, reference = stateful(family)
    prompts = [*prompts_with_prefixes()[:3], *turns()]
    num_pages_with_states = num_pages + 5 * state_pages(model)
    engine = engine_of(model, num_pages=num_pages_with_states, budget=budget, snapshots=snapshots, kv_groups="all")
    completions = engine.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    if num_pages == 256:
        assert sum(completion.cached_tokens for completion in completions) >= 20 + 28 + 28
    assert engine.kv_live_bytes() == 0
    engine.check()


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.long] if family in SLOW else []) for family in FAMILIES],
)
def test_prompts_that_share_only_their_beginning_go_on_from_where_they_part(
    stateful: Callable[[str], tuple[Any, Any]], family: str
) -> None:
    """L6: the second prompt leaves a state where it parts from the first, within its chunk; later ones hit."""
    model, reference = stateful(family)
    random = Random(3)
    shared = [random.randrange(VOCABULARY) for _ in range(3 * PAGE_SIZE)]
    prompts = [[*shared, *(random.randrange(VOCABULARY) for _ in range(PAGE_SIZE + 3))] for _ in range(4)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    cached = {}
    for snapshots in ("ends", "branches"):
        engine = engine_of(model, num_pages=256, snapshots=snapshots, kv_groups="all")
        completions = [engine.generate([prompt], params)[0] for prompt in prompts]
        for prompt, completion in zip(prompts, completions, strict=True):
            assert list(completion.tokens) == undisturbed(reference, prompt, params.max_tokens)
        cached[snapshots] = [completion.cached_tokens for completion in completions]
        engine.check()
    assert cached == {"ends": [0] * 4, "branches": [0, 0, 3 * PAGE_SIZE, 3 * PAGE_SIZE]}


def test_a_sequence_that_was_preempted_is_computed_again(stateful: Callable[[str], tuple[Any, Any]]) -> None:
    """L6, L8: its state is gone, and snapshots most often are, since they are evicted before anything is preempted."""
    model, reference = stateful("qwen3_next")
    engine = engine_of(model, num_pages=26 + 3 * state_pages(model), budget=64, seqs=3, kv_groups="all")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[seed * 20 + place for place in range(17)] for seed in range(1, 4)]
    requests = [engine.request(engine.submit(prompt, params)) for prompt in prompts]
    done = {}
    while engine.has_work:
        done.update({completion.index: completion for completion in engine.step()})
        engine.check()
    for request, prompt in zip(requests, prompts, strict=True):
        assert list(done[request.index].tokens) == undisturbed(reference, prompt, 30)
    assert sum(request.num_preemptions for request in requests) >= 1
    assert sum(request.recomputed_tokens for request in requests) >= 17


@pytest.mark.laws
@settings(max_examples=6)
@given(
    seed=st.integers(0, 1 << 30),
    family=st.sampled_from(sorted(FAMILIES)),
    snapshots=st.sampled_from(["ends", "branches"]),
)
def test_requests_come_and_go_at_any_time(
    stateful: Callable[[str], tuple[Any, Any]], seed: int, family: str, snapshots: Any
) -> None:
    """L6, L8: random arrivals, cancels, priorities and memory, and the laws of accounting after every step."""
    model, reference = stateful(family)
    random = Random(seed)
    shared = [random.randrange(VOCABULARY) for _ in range(30)]
    engine = engine_of(
        model,
        num_pages=random.choice([12, 16, 60]) + random.choice([2, 3, 5]) * state_pages(model),
        budget=random.choice([5, 16, 256]),
        seqs=random.choice([1, 3, 6]),
        snapshots=snapshots,
        kv_groups="all",
    )

    def draw_prompt() -> Ids:
        end = random.choice([9, 18, 30, random.randrange(31)])
        return shared[:end] + [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 6))]

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for prompt, completion in serve_at_random(engine, random, draw_prompt, params, num_turns=30):
        if completion.finish_reason != "cancelled":
            assert list(completion.tokens) == undisturbed(reference, prompt, params.max_tokens)


def test_a_layer_that_goes_on_by_one_token_is_run_token_by_token(stateful: Callable[[str], tuple[Any, Any]]) -> None:
    for family in FAMILIES:
        states = examine(stateful(family)[0]).states
        assert {state.is_stepwise for state in states} == {family == "jamba"}


# Controls -------------------------------------------------------------------------------------------------


def says_what_is_right(model: Any, reference: Any) -> bool:
    """Whether turns that go on from snapshots say what they would by themselves."""
    prompts = turns()[:4]
    engine = engine_of(model, num_pages=200, budget=64, seqs=2, kv_groups="all")
    said = [list(completion.tokens) for prompt in prompts for completion in engine.generate([prompt], GREEDY)]
    return said == [undisturbed(reference, prompt, GREEDY.max_tokens) for prompt in prompts]


@pytest.mark.parametrize("family", [*(pytest.param(family, marks=pytest.mark.long) for family in SLOW[:2]), "lfm2"])
def test_a_snapshot_one_token_early_changes_what_is_said(
    stateful: Callable[[str], tuple[Any, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that did not matter, the tests above would prove nothing."""
    model, reference = stateful(family)
    assert says_what_is_right(model, reference)
    take = GroupBatch.take_snapshots

    def early(batch: GroupBatch) -> tuple[Snapshot, ...]:
        return tuple(replace(one, num_tokens=one.num_tokens - 1) for one in take(batch))

    monkeypatch.setattr(GroupBatch, "take_snapshots", early)
    assert not says_what_is_right(model, reference)


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_a_first_token_that_reads_what_was_there_before_changes_what_is_said(
    stateful: Callable[[str], tuple[Any, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control for states that begin with nothing: blocks have what another sequence left."""
    model, reference = stateful(family)
    make = StateTables.batch

    def not_new(tables: StateTables, plan: Any) -> StateBatch:
        batch = make(tables, plan)
        chunks = [
            replace(chunk, begins_from=chunk.leaves[-1][1]) if chunk.begins_from is None else chunk
            for chunk in batch.chunks
        ]
        return replace(batch, chunks=tuple(chunks))

    monkeypatch.setattr(StateTables, "batch", not_new)
    engine = engine_of(model, num_pages=20 + 2 * state_pages(model), budget=64, seqs=1, kv_groups="all")
    prompts = turns()[:1] + prompts_with_prefixes()[:2]
    said = [list(completion.tokens) for prompt in prompts for completion in engine.generate([prompt], GREEDY)]
    assert said != [undisturbed(reference, prompt, GREEDY.max_tokens) for prompt in prompts]


# Memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allocated_tensors_are_what_the_groups_say(family: str, dtype: torch.dtype, stateful: Any) -> None:
    model = deepcopy(stateful(family)[1]).to(dtype)
    engine = engine_of(model, num_pages=40, kv_groups="all")
    cut = KVRoom(model, PAGE_SIZE, "all").cut
    assert cut is not None
    memory = cut.memory
    assert engine.kv_bytes() == memory.num_blocks(40) * memory.block_bytes == 40 * memory.page_bytes
    states = examine(model).states
    group = memory.groups[-1]
    num_bytes = sum(state.num_bytes for state in states)
    assert group.num_layers * group.layer.state_bytes == num_bytes
    assert 0 <= group.part_bytes - num_bytes < memory.block_bytes, "whole blocks, and no more than needed"


def test_a_sequence_holds_its_pages_and_its_state(stateful: Any) -> None:
    model, _ = stateful("qwen3_next")
    cut = KVRoom(model, PAGE_SIZE, "all").cut
    assert cut is not None
    pages, state = cut.memory.groups
    engine = engine_of(model, num_pages=64, kv_groups="all")
    engine.submit(list(range(30)), GREEDY)
    engine.step()
    for num_tokens in range(31, 31 + GREEDY.max_tokens - 2):
        engine.step()
        assert engine.kv_live_bytes() == -(-num_tokens // PAGE_SIZE) * pages.part_bytes + state.part_bytes


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "granitemoehybrid"])
def test_the_state_is_what_the_config_says(family: str, stateful: Any, tmp_path: Any) -> None:
    """What `kvarts model show` and replays count of a config, and what a model has when it runs, to the byte.

    A config is counted in 16 bits, as engines load it; the model here keeps its states in 32.
    """
    model, _ = stateful(family)
    config = deepcopy(model.config)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    geometry = load_geometry(tmp_path)
    (counted,) = [group for group in geometry.kv_groups if group.layer.kind == "state"]
    states = examine(model).states
    assert counted.num_layers == len(states)
    assert {state.num_bytes for state in states} == {2 * counted.layer.state_bytes}


@given(st.data())
def test_states_are_read_as_they_were_written(data: st.DataObject) -> None:
    """In any number of tensors, of blocks of any size, beside others that stay as they are."""
    sizes = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4), label="bytes of a block in each tensor")
    kinds = st.tuples(st.sampled_from(["conv", "recurrent"]), st.integers(1, 5), st.integers(1, 4))
    layers = data.draw(st.lists(st.lists(kinds, min_size=1, max_size=3), min_size=1, max_size=3), label="layers")
    dtypes = {"conv": torch.bfloat16, "recurrent": torch.float32}
    shapes = [
        StateShape(str(place), place, tuple(StateTensor(kind, 0, (a, b), dtypes[kind]) for kind, a, b in layer))  # type: ignore[arg-type]
        for place, layer in enumerate(layers)
    ]
    each = -(-sum(shape.num_bytes for shape in shapes) // sum(sizes))
    num_states = data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    num_blocks = num_states * each + 3
    tensors = [torch.zeros((num_blocks, size), dtype=torch.uint8) for size in sizes]
    memory = StateMemory(tensors, shapes, each)
    blocks = torch.randperm(num_blocks, generator=generator)
    ids = blocks[: num_states * each].view(num_states, each)
    written = []
    for number, shape in enumerate(shapes):
        states = [torch.randn((num_states, *one.shape), generator=generator).to(one.dtype) for one in shape.tensors]
        memory.write(number, ids, states)
        written.append(states)
    for number, states in enumerate(written):
        for mine, expected in zip(memory.read(number, ids.flip(0)), states, strict=True):
            assert torch.equal(mine.flip(0), expected)
    assert not any(tensor[blocks[num_states * each :]].any() for tensor in tensors)


# What does not go -----------------------------------------------------------------------------------------


def test_a_state_needs_kv_groups(stateful: Any) -> None:
    model, _ = stateful("qwen3_next")
    with pytest.raises(ConfigError, match="3 layers that keep a state") as error:
        LLM(model, None, kv_memory=1 << 20, kv_groups="off")
    assert error.value.field == "kv_groups"


def test_a_memory_without_room_for_two_states_runs_nothing(stateful: Any) -> None:
    """A prompt beyond a page may begin from a snapshot, which it then has beside its own state."""
    model, _ = stateful("qwen3_next")
    engine = engine_of(model, num_pages=2 * state_pages(model), kv_groups="all")
    with pytest.raises(ConfigError, match="blocks"):
        engine.submit(list(range(30)), GREEDY)
    assert engine.kv_live_bytes() == 0
