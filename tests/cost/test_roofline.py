"""The roofline: against one that counts pair by pair and layer by layer, and what must hold of any."""

from __future__ import annotations

from random import Random
from statistics import NormalDist
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.core.sched.plan import Batch, Chunk
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.roofline import RooflineCost, parse_cost
from kvarts.cost.roofline_settings import SCALES, Scale, ScaleOf, shipped_constants
from kvarts.cost.step_arrays import StepArrays
from kvarts.sim.config import ReplayConfig, make_config

from builders.case import Case, cases
from builders.laws import assert_fast_as_slow

MODELS = ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "deepseek-v3", "gpt-oss-120b", "mistral-7b"]
MODELS += [
    "gemma-4-26b-a4b",
    "gemma-3n-e4b",
    "qwen3-next-80b-a3b",
    "llama-4-maverick",
    "deepseek-v3.2",
    "MiniMaxAI/MiniMax-M3",
]

rooflines = st.builds(
    RooflineCost,
    llm=st.sampled_from(MODELS),
    device=st.sampled_from(["h100-80gb", "rtx-4090", "mi300x", "b200-180gb", "a100-80gb"]),
    tensor_parallel=st.sampled_from([1, 2, 8]),
    weight_dtype=st.sampled_from([None, None, "fp8", "fp8-block", "nvfp4"]),
    kv_dtype=st.sampled_from([None, "fp8"]),
    compute_efficiency=st.floats(0.1, 1.0),
    bandwidth_efficiency=st.floats(0.1, 1.0),
    attention_efficiency=st.floats(0.1, 1.0),
    step_us=st.floats(0.0, 5000.0),
    sequence_us=st.floats(0.0, 100.0),
    pipeline_parallel=st.sampled_from([1, 1, 2, 5]),
    expert_efficiency=st.floats(0.1, 1.0),
    expert_compute=st.floats(0.2, 1.0),
    scale=st.sampled_from([Scale(), Scale(layer=1.3, prefill=0.7, bandwidth=0.8, compute=0.6)]),
    link_efficiency=st.none() | st.floats(0.05, 1.0),
    link_us=st.none() | st.floats(0.0, 100.0),
    graph_tokens=st.sampled_from([0, 0, 20, 512]),
    eager_us=st.sampled_from([0.0, 0.0, 30_000.0]),
    exchange_us=st.none() | st.floats(0.0, 100.0),
    layer_us=st.floats(0.0, 100.0),
    expert_layer_us=st.floats(0.0, 100.0),
    expert_half_mb=st.floats(0.0, 5.0),
    fp8_compute=st.floats(0.3, 1.1),
    fp8_bandwidth=st.floats(0.3, 1.1),
    fp4_compute=st.floats(0.3, 1.1),
    fp4_bandwidth=st.floats(0.3, 1.1),
    eager_layer_us=st.sampled_from([0.0, 200.0, 2000.0]),
    eager_expert_layer_us=st.sampled_from([0.0, 500.0]),
    attention_compute=st.floats(0.3, 1.1),
    sparse_layer_us=st.floats(0.0, 100.0),
    quantize_us=st.floats(0.0, 20.0),
    separate_passes=st.booleans(),
)
rooflines = rooflines.flatmap(
    lambda cost: st.sampled_from([(), (), (0.9,), (0.8, 0.6, 0.4)]).map(
        lambda rates: msgspec.structs.replace(cost, speculative_tokens=len(rates), acceptance=rates)
    )
)


@st.composite
def in_lockstep(draw: st.DrawFn) -> RooflineCost:
    """A cost with several ranks."""
    cost = draw(rooflines.filter(lambda cost: cost.geometry.experts is not None))
    ranks = draw(st.sampled_from([2, 3]))
    every = ranks * cost.tensor_parallel
    # Blocks of fp8 weights cannot be divided by three.
    whole = draw(st.sampled_from([every] if ranks == 3 and cost.geometry.fp8_block is not None else [1, every]))
    return msgspec.structs.replace(cost, pipeline_parallel=1, data_parallel=ranks, expert_parallel=whole)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    start = draw(st.integers(0, 5000))
    count = draw(st.integers(1, 400))
    known = start + count + draw(st.sampled_from([0, 0, 7]))
    return Chunk(start, count, known, known)


BUSIEST = {1: 0.0, **{count: NormalDist().inv_cdf((count - 3 / 8) / (count + 1 / 4)) for count in range(2, 25)}}
"""How far the largest of so many normal numbers is above the mean, on average: Blom's approximation."""


def padded(num_tokens: int, largest: int) -> int:
    """The smallest captured graph that holds as many tokens; as many, where none does."""
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8), *range(272, 4096, 16)) if size < largest] + [largest]
    return next((size for size in sizes if size >= num_tokens), num_tokens) if largest else num_tokens


def naive_ms(cost: RooflineCost, *batches: Batch) -> float:
    """One pass over everything, or one over all prompts and one over all decodes, of which drafts make more tokens."""
    assert cost.scale is not None
    of_layers = ("layer_us", "expert_layer_us", "sparse_layer_us", "quantize_us")
    changes = {name: getattr(cost, name) * cost.scale.layer for name in of_layers}
    changes |= {
        "eager_layer_us": cost.eager_layer_us * cost.scale.prefill,
        "eager_expert_layer_us": cost.eager_expert_layer_us * cost.scale.prefill,
        "bandwidth_efficiency": cost.bandwidth_efficiency * cost.scale.bandwidth,
        "compute_efficiency": cost.compute_efficiency * cost.scale.compute,
    }
    cost = msgspec.structs.replace(cost, scale=Scale(), **changes)
    prompts = [Batch(batch.chunks, 0, 0, 1) for batch in batches if batch.chunks]
    decodes = [Batch((), batch.num_decodes, batch.decode_known_tokens, 1) for batch in batches if batch.num_decodes]
    if not decodes:
        return naive_pass_ms(cost, *prompts)
    decodes_ms = naive_pass_ms(cost, *decodes)
    prompts_ms = 0.0
    if prompts:
        prompts_ms = naive_pass_ms(cost, *(prompts if cost.separate_passes else batches))
        prompts_ms -= 0.0 if cost.separate_passes else decodes_ms
    return max(0.0, prompts_ms) + decodes_ms / (1 + sum(cost.acceptance))


def naive_pass_ms(cost: RooflineCost, *batches: Batch) -> float:
    """Every matrix, layer, pair and collective by itself; decodes of a batch all know the same number of tokens."""
    geometry: Geometry = cost.geometry
    device, ways, ranks = cost.hardware, cost.tensor_parallel, cost.num_ranks
    link = device.link_bytes_per_s * cost.coefficient("link_efficiency")
    bits = {"bfloat16": 16.0, "fp8-block": 8 + 32 / 128**2, "mxfp4": 4.25, "fp8": 8.0, "int4-block": 4 + 20 / 128}
    bits["nvfp4"] = 4.5
    bandwidth = device.bandwidth_bytes_per_s

    def flops(dtype: str) -> float:
        unit = {"fp8-block": "fp8", "fp8": "fp8", "nvfp4": "nvfp4"}.get(dtype, "bfloat16")
        share = {16: 1.0, 8: cost.fp8_compute, 4: cost.fp4_compute}[int(bits[dtype])]
        return device.tflops.get(unit, device.tflops["bfloat16"]) * 1e12 * cost.compute_efficiency * share

    def read_bytes_per_s(dtype: str) -> float:
        share = {16: 1.0, 8: cost.fp8_bandwidth, 4: cost.fp4_bandwidth}[int(bits[dtype])]
        return bandwidth * cost.bandwidth_efficiency * share

    experts = geometry.experts
    verified = 1 + cost.speculative_tokens
    tokens_of = [batch.num_tokens + batch.num_decodes * (verified - 1) for batch in batches]
    of_all, largest = sum(tokens_of), max(tokens_of)

    def layers_s(num_tokens: int, num_routed: int, parts: int) -> tuple[float, float]:
        """Reading the matrices of all layers, and multiplying with them."""
        num_tokens = padded(num_tokens, cost.graph_tokens)
        read_s = work_s = 0.0
        rest = geometry.common_matrix  # what layers have beside plain attention and feed-forward: states, low ranks
        for layer in range(geometry.num_layers):
            numbers = geometry.attention_matrix
            if experts is None or layer < geometry.num_layers - experts.num_layers:
                numbers += 3 * geometry.hidden_size * geometry.intermediate_size
            else:
                numbers += geometry.hidden_size * (3 * experts.shared_size + experts.count)
                whole = 3 * geometry.hidden_size * experts.intermediate_size
                one = whole / ranks
                one_bytes = whole * bits[geometry.expert_dtype] / 8
                held_bytes = one_bytes if cost.expert_parallel > 1 else one_bytes / (ways * ranks)
                saturation = held_bytes / (held_bytes + cost.expert_half_mb * 1e6)
                rate = read_bytes_per_s(geometry.expert_dtype) * cost.expert_efficiency * saturation
                missed = (1 - experts.per_token / experts.count) ** (num_routed / parts)
                groups = cost.expert_parallel  # devices that have whole experts: all wait for the busiest
                held, above = experts.count / groups, BUSIEST[groups]
                active = held * (1 - missed) + above * (held * (1 - missed) * missed) ** 0.5
                read_s += min(active, held) * groups * one_bytes / ranks / min(rate, bandwidth)
                expert_flops = flops(geometry.expert_dtype) * cost.expert_efficiency * cost.expert_compute
                processed = experts.per_token * num_routed / groups
                work_s += 2 * one * (processed + above * processed**0.5) * groups / expert_flops
            rest -= numbers
            read_s += numbers * bits[geometry.weight_dtype] / 8 / read_bytes_per_s(geometry.weight_dtype)
            work_s += 2 * numbers * num_tokens / flops(geometry.weight_dtype)
        read_s += rest * bits[geometry.weight_dtype] / 8 / read_bytes_per_s(geometry.weight_dtype)
        work_s += 2 * rest * num_tokens / flops(geometry.weight_dtype)
        return read_s, work_s

    slowest = 0.0
    for batch, computed in zip(batches, tokens_of, strict=True):
        sampled = batch.num_decodes * verified + sum(chunk.is_last for chunk in batch.chunks)
        sequences = batch.num_decodes + len(batch.chunks)
        parts = max(1, min(cost.pipeline_parallel, sequences))
        read_s, work_s = layers_s(computed, of_all, parts)
        if sampled:
            read_s += geometry.vocab_size * geometry.hidden_size * 2 / read_bytes_per_s("bfloat16")
            work_s += 2 * geometry.vocab_size * geometry.hidden_size * sampled / flops(geometry.dtype)
        seconds = max(read_s, work_s / parts) / ways
        latent = geometry.latent
        for attending in geometry.layers:
            if not attending.attends:
                continue
            window = attending.span
            if latent is None:
                heads = max(1, -(-attending.num_heads // ways))
                token_bytes = heads * attending.head_numbers * bits[cost.kv_dtype or geometry.dtype] / 8
                operations = decode_operations = 2 * geometry.num_heads * attending.head_numbers / ways
            else:
                token_bytes = (latent.kv_rank + latent.rope_dim) * bits[cost.kv_dtype or geometry.dtype] / 8
                if geometry.sparse is not None and cost.kv_dtype == "fp8" and cost.hardware.capability != 10:
                    token_bytes = 656  # with scales, and rotary numbers in 16 bits
                operations = 2 * geometry.num_heads * (latent.nope_dim + latent.rope_dim + latent.v_dim) / ways
                decode_operations = 2 * geometry.num_heads * (2 * latent.kv_rank + latent.rope_dim) / ways
            kv_s = token_bytes / bandwidth / cost.attention_efficiency
            prompt_flops = flops(geometry.dtype) * cost.attention_compute
            kinds = [(window, operations / prompt_flops, decode_operations / flops(geometry.dtype), kv_s)]
            sparse = geometry.sparse
            if sparse is not None:
                if latent is not None or attending.fixed_bytes:
                    kinds = [(sparse.top_tokens, *kinds[0][1:])]
                if attending.fixed_bytes:  # an indexer looks at all tokens
                    # MiniMax M3: keys in 16 bits, and queries divided over devices.
                    num_heads = float(sparse.num_heads / (1 if latent is not None else ways))
                    score_s = 2 * num_heads * sparse.key_dim / flops("fp8")
                    key_bytes = 2 * sparse.key_dim if latent is None else sparse.key_dim + 4
                    kinds.append((None, score_s, score_s, key_bytes / bandwidth / cost.attention_efficiency))
            for span, pair_s, decode_pair_s, token_s in kinds:
                for chunk in batch.chunks:
                    pairs = sum(min(end, span or end) for end in range(chunk.start + 1, chunk.end + 1))
                    read = min(chunk.end, (span or chunk.end) + chunk.num_tokens)
                    seconds += max(pairs * pair_s, read * token_s) / parts
                if batch.num_decodes:
                    each = batch.decode_known_tokens / batch.num_decodes
                    seen = batch.num_decodes * min(each, span or each)
                    seconds += seen * max(verified * decode_pair_s, token_s) / parts
        state_s = 2 * geometry.state_bytes / ways / bandwidth / cost.bandwidth_efficiency
        slowest = max(slowest, seconds + sequences * (cost.sequence_us / 1e6 + state_s))
    # Collectives: what each device sends and receives of the activations, and a constant time.
    activation, constant = geometry.hidden_size * 2, cost.coefficient("link_us") / 1e6
    exchange = cost.coefficient("exchange_us") / 1e6
    exchanged = layers = launched = constants = 0.0
    for layer in range(geometry.num_layers):
        layers += cost.layer_us
        if geometry.sparse is not None and geometry.layers[layer].fixed_bytes:
            layers += cost.sparse_layer_us
        launched += cost.eager_layer_us
        if experts is not None and layer >= geometry.num_layers - experts.num_layers:
            layers += cost.expert_layer_us
            launched += cost.eager_expert_layer_us
        # Inputs are quantized where products are native and each block has its own scale: before the matrices of
        # queries, keys and values, of attention's output, and before both of feed-forward.
        native = [("fp8-block", "fp8"), ("nvfp4", "nvfp4")]
        quantizes = [dtype for dtype, unit in native if unit in device.tflops]
        in_experts = experts is not None and layer >= geometry.num_layers - experts.num_layers
        for dtype in 2 * [geometry.weight_dtype] + 2 * [geometry.expert_dtype if in_experts else geometry.weight_dtype]:
            layers += cost.quantize_us if dtype in quantizes else 0.0
        is_expert = experts is not None and layer >= geometry.num_layers - experts.num_layers
        if ways > 1:
            exchanged += largest / parts * activation * 2 * (ways - 1) / ways / link + constant
            constants += constant
            if not (is_expert and ranks > 1):
                exchanged += largest / parts * activation * 2 * (ways - 1) / ways / link + constant
                constants += constant
        if is_expert and ranks > 1:
            every = ways * ranks
            exchanged += 2 * (of_all * activation * (every - 1) / every / link + exchange)
            constants += 2 * exchange
    exchanged += (cost.pipeline_parallel - 1) * (largest * activation / max(link, 1e-30) + constant)
    constants += (cost.pipeline_parallel - 1) * constant
    most = max(batch.num_decodes for batch in batches)
    if most and cost.speculative_tokens:
        read_s, work_s = layers_s(most, sum(batch.num_decodes for batch in batches), 1)
        exchanged += cost.speculative_tokens / geometry.num_layers * max(read_s, work_s) / ways
        head_bytes = geometry.vocab_size * geometry.hidden_size * 2
        exchanged += cost.speculative_tokens * head_bytes / ways / read_bytes_per_s("bfloat16")
        exchanged += cost.speculative_tokens / geometry.num_layers * (layers / 1e6 + constants)
    ms = (slowest + exchanged) * 1e3 + (cost.step_us + layers) / 1e3
    return max(ms + launched / 1e3, cost.eager_us / 1e3) if largest > cost.graph_tokens else ms


@given(rooflines, st.lists(chunks(), max_size=3), st.integers(0, 200), st.integers(1, 6000))
def test_a_step_takes_what_its_parts_take(cost: RooflineCost, some: list[Chunk], decodes: int, each: int) -> None:
    if not some and not decodes:
        return
    batch = Batch(tuple(some), decodes, decodes * each, 1)
    assert cost.step_ns(batch) / 1e6 == pytest.approx(naive_ms(cost, batch), rel=1e-9, abs=1e-6)


batches = st.builds(
    lambda some, decodes, each: Batch(tuple(some), decodes, decodes * each, 1),
    st.lists(chunks(), max_size=2),
    st.integers(0, 200),
    st.integers(1, 6000),
).filter(lambda batch: batch.num_tokens > 0)


@given(in_lockstep(), st.lists(batches, min_size=1, max_size=3), st.randoms())
def test_ranks_take_as_long_as_the_slowest_and_what_they_exchange(
    cost: RooflineCost, some: list[Batch], random: Random
) -> None:
    some = some[: cost.num_ranks]
    expected = cost.together_ns(some)
    assert expected / 1e6 == pytest.approx(naive_ms(cost, *some), rel=1e-9, abs=1e-6)
    shuffled = random.sample(some, len(some))
    assert cost.together_ns(shuffled) == pytest.approx(expected, abs=1)
    if not cost.speculative_tokens:  # which make more tokens of a part of a step that is longer
        assert all(expected >= cost.step_ns(batch) - 1 for batch in some)


@given(rooflines, st.lists(batches, min_size=1, max_size=6))
def test_steps_in_arrays_take_as_long_as_each_alone(cost: RooflineCost, some: list[Batch]) -> None:
    """Also under constants that the arrays were not made for."""
    arrays = StepArrays(cost, [[batch] for batch in some])
    for other in (cost, msgspec.structs.replace(cost, layer_us=33.0, link_us=7.0, attention_efficiency=0.5)):
        assert arrays.times_ms(other) * 1e6 == pytest.approx(
            [other.step_ns(batch) for batch in some], abs=0.51, rel=1e-12
        )


@given(in_lockstep(), st.lists(st.lists(batches, min_size=1, max_size=3), min_size=1, max_size=4))
def test_steps_of_ranks_in_arrays_take_as_long_as_each_alone(cost: RooflineCost, some: list[list[Batch]]) -> None:
    steps = [each[: cost.num_ranks] for each in some]
    expected = [cost.together_ns(each) for each in steps]
    assert StepArrays(cost, steps).times_ms(cost) * 1e6 == pytest.approx(expected, abs=0.51, rel=1e-12)


@given(in_lockstep(), st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100_000)), min_size=1, max_size=3))
def test_many_steps_of_ranks_are_as_one_by_one(cost: RooflineCost, some: list[tuple[int, int]]) -> None:
    decodes = [(num, known + num) for num, known in some[: cost.num_ranks]]
    one_by_one = [
        cost.together_ns([Batch((), num, known + step * num, 1) for num, known in decodes]) for step in range(40)
    ]
    assert cost.decodes_together_ns(decodes, 40) == one_by_one


@given(rooflines, st.integers(1, 300), st.integers(1, 100_000), st.integers(1, 80))
def test_many_steps_are_as_one_by_one(cost: RooflineCost, decodes: int, known: int, steps: int) -> None:
    known += decodes
    expected = [cost.step_ns(Batch((), decodes, known + index * decodes, 1)) for index in range(steps)]
    assert cost.decode_ns(decodes, known, 1, steps) == expected


@given(rooflines, chunks(), st.integers(1, 100), st.integers(1, 5000))
def test_more_work_never_takes_less(cost: RooflineCost, chunk: Chunk, decodes: int, each: int) -> None:
    """Without stages: with another sequence, a batch is divided into more parts, which are taken to be alike.

    And without drafts: these make more tokens of the part of a step that is not the prompts'.
    """
    cost = msgspec.structs.replace(cost, pipeline_parallel=1, speculative_tokens=0, acceptance=())
    small = cost.step_ns(Batch((), decodes, decodes * each, 1))
    assert cost.step_ns(Batch((chunk,), decodes, decodes * each, 1)) >= small
    assert cost.step_ns(Batch((), decodes + 1, (decodes + 1) * each, 1)) >= small
    assert cost.step_ns(Batch((), decodes, decodes * (each + 1), 1)) >= small


@pytest.mark.laws
@given(cases(max_requests=12), st.sampled_from(["llama-3.1-8b", "gemma-3-27b"]))
def test_fast_forward_equals_step_by_step(case: Case, model: str) -> None:
    """L5, with a cost that knows the model."""
    assert_fast_as_slow(case, cost=RooflineCost(llm=model, device="rtx-4090"))


def test_one_token_is_bound_by_memory_and_a_long_prompt_by_arithmetic() -> None:
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb", step_us=0.0, sequence_us=0.0, layer_us=0.0)
    weights = 2 * (cost.geometry.num_parameters - cost.geometry.head_matrix)
    one = cost.step_ns(Batch((), 1, 1, 1)) / 1e9
    assert one == pytest.approx(weights / (3350e9 * cost.bandwidth_efficiency), rel=0.001)
    prompt = cost.step_ns(Batch((Chunk(0, 8192, 8192, 8192),), 0, 0, 1)) / 1e9
    assert prompt > 2 * 8192 * cost.geometry.common_matrix / (989.4e12 * cost.compute_efficiency)


def test_a_model_and_a_device_fill_in_the_rest() -> None:
    config = make_config({"model": "llama-3.1-8b", "device": "h100-80gb"})
    assert config.cost == RooflineCost(llm="llama-3.1-8b", device="h100-80gb")
    assert 20_000 < config.num_pages < 40_000
    fewer = make_config({"model": "llama-3.1-8b", "device": "h100-80gb", "kv_memory": "2GiB", "kv_dtype": "fp8"})
    assert fewer.num_pages == (2 << 30) // (16 * 65_536)
    assert make_config({"model": "llama-3.1-8b", "device": "h100-80gb", "pages": 7}).num_pages == 7
    assert make_config({"model": "llama-3.1-8b", "device": "l40s", "cost": "polynomial"}).cost == ReplayConfig().cost


def test_coefficients_belong_to_the_device_and_geometry_to_the_model(tmp_path: Any) -> None:
    path = tmp_path / "cost.toml"
    path.write_text('[cost]\nmodel = "roofline"\nllm = "llama-3.1-8b"\ndevice = "l40s"\nstep_us = 123.0\n')
    assert make_config({"cost": str(path)}).cost == parse_cost(str(path))
    cost = make_config({"cost": str(path), "model": "qwen3-8b"}).cost
    assert (cost.llm, cost.device, cost.step_us) == ("qwen3-8b", "l40s", 123.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": "llama-3.1-8b"}, "model: says nothing without a device. Model and device go together: device"),
        ({"device": "l40s"}, "device: says nothing without a model. Model and device go together: model"),
        ({"kv_memory": "1GiB"}, "kv_memory: says nothing without a model"),
        (
            {"model": "llama-3.1-8b", "device": "l40s", "kv_memory": "1GiB", "pages": 4},
            "kv_memory: cannot be combined with pages",
        ),
        ({"model": "llama-3.1-8b", "device": "l40s", "kv_memory": "1kB"}, "kv_memory: 1kB hold no page"),
        (
            {"model": "granite-4.0-h-tiny", "device": "l40s", "kv_memory": "1GiB", "kv_groups": "off"},
            "kv_memory: 1GiB hold no page of 131,072 bytes beside 7,431,782,400 bytes of states of 256 sequences",
        ),
        ({"model": "llama-3.1-8b", "device": "l40s", "kv_memory": "much"}, "'much' is not a size"),
        ({"model": "llama-3.1-8b", "device": "l40s", "tensor_parallel": 3}, "cannot share the 32 attention heads"),
        ({"model": "llama-3.1-8b", "device": "l40s", "tensor_parallel": 0}, "tensor_parallel"),
        ({"model": "llama-3.1-8b", "device": "cpu:", "tensor_parallel": 2}, "has no link"),
        ({"model": "llama-3.1-8b", "device": "l40s", "kv_dtype": "bf8"}, "kv_dtype: 'bf8' is not known"),
        ({"model": "llama-3.1-8b", "device": "l40s", "page_size": "wide"}, "page_size"),
        ({"cost": {"model": "roofline", "llm": "llama-3.1-8b", "device": "l40s", "step_us": -1.0}}, "cost.step_us"),
        (
            {"cost": {"model": "roofline", "llm": "llama-3.1-8b", "device": "l40s", "compute_efficiency": 0.0}},
            "compute_efficiency: must be at least 1e-12",
        ),
        ({"cost": "nowhere.toml"}, "nowhere.toml: no such file"),
    ],
)
def test_what_cannot_be_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(KvartsError) as caught:
        make_config(values)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cost = 1", "cost"),
        ("[other]", "cost: is missing"),
        ("[cost]\nmodel = 'cubic'", "cost.model"),
        ("=", "no readable TOML"),
    ],
)
def test_a_cost_file_that_is_none(tmp_path: Any, text: str, says: str) -> None:
    path = tmp_path / "cost.toml"
    path.write_text(text)
    with pytest.raises(KvartsError) as caught:
        parse_cost(str(path))
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_one_device_more_needs_a_link() -> None:
    with pytest.raises(ConfigError, match="has no link"):
        RooflineCost(llm="qwen3-0.6b", device="cpu:cores=2", tensor_parallel=2)


def test_only_native_products_with_a_scale_per_block_quantize_their_inputs() -> None:
    def counted(llm: str, device: str, weight_dtype: str | None) -> int:
        return RooflineCost(llm=llm, device=device, weight_dtype=weight_dtype).parts.num_quantized

    assert counted("llama-3.1-8b", "b200-180gb", "nvfp4") == 4 * 32
    assert counted("llama-3.1-8b", "h100-80gb", "nvfp4") == 0  # expanded to 16 bits
    assert counted("llama-3.1-8b", "h100-80gb", "fp8") == 0  # one scale per matrix
    assert counted("llama-3.1-8b", "a100-80gb", "fp8-block") == 0
    assert counted("qwen3-30b-a3b", "h100-80gb", "fp8-block") == 4 * 48
    assert counted("gpt-oss-120b", "b200-180gb", None) == 0
    cost = RooflineCost(llm="llama-3.1-8b", device="h100-80gb", weight_dtype="fp8-block")
    assert "quantize_us" in cost.active_coefficients
    assert "quantize_us" not in RooflineCost(llm="llama-3.1-8b", device="h100-80gb").active_coefficients
    slower = msgspec.structs.replace(cost, quantize_us=cost.quantize_us + 1.0)
    step = Batch((), 8, 8000, 1)
    assert slower.step_ns(step) - cost.step_ns(step) == pytest.approx(4 * 32 * 1000, abs=2)


# Factors of engines and of devices ------------------------------------------------------------------------

BATCHES = [
    Batch((), 12, 9_000, 1),
    Batch((Chunk(0, 700, 700, 700),), 0, 0, 1),
    Batch((Chunk(100, 1_900, 2_500, 2_500),), 5, 4_000, 1),
]


@pytest.mark.parametrize("llm", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_scale_multiplies_the_constants_that_it_names(llm: str) -> None:
    ways: dict[str, Any] = {"tensor_parallel": 8} if llm == "deepseek-v3" else {}
    plain = RooflineCost(llm=llm, device="h200", scale=Scale(), **ways)
    for factor, names in SCALES.items():
        scaled = msgspec.structs.replace(plain, scale=Scale(**{factor: 1.5}))
        replaced = msgspec.structs.replace(plain, **{name: 1.5 * getattr(plain, name) for name in names})
        assert [scaled.step_ns(each) for each in BATCHES] == [replaced.step_ns(each) for each in BATCHES]
        assert scaled.decode_ns(7, 3_000, 1, 20) == replaced.decode_ns(7, 3_000, 1, 20)
        assert StepArrays(scaled, [[each] for each in BATCHES]).times_ms(scaled) == pytest.approx(
            [scaled.step_ns(each) / 1e6 for each in BATCHES], abs=1e-6
        )
        assert scaled.is_shipped  # the constants are those that ship, for this engine


def test_a_scale_is_that_of_engine_version_and_device_for_a_kind_and_a_format() -> None:
    rows = [
        ScaleOf(of="sglang", layer=1.2),
        ScaleOf(of="sglang==0.5.12", layer=0.5, prefill=3.0),
        ScaleOf(of="mi300x", kind="experts", layer=2.0, compute=0.5),
        ScaleOf(of="mi300x", kind="experts", weight="fp4", prefill=4.0),
    ]
    constants = msgspec.structs.replace(shipped_constants(), scale=rows)
    dense = RooflineCost(llm="llama-3.1-8b", device="h200")
    assert constants.scale_of("sglang", dense) == constants.scale_of("sglang==0.5.9", dense) == Scale(layer=1.2)
    assert constants.scale_of("sglang==0.5.12", dense) == Scale(layer=0.6, prefill=3.0)
    assert constants.scale_of("vllm", dense) == constants.scale_of("", dense) == Scale()
    assert constants.scale_of("sglang", dense.placed(device="mi300x")) == Scale(layer=1.2)
    experts = RooflineCost(llm="qwen3-30b-a3b", device="mi300x")
    assert constants.scale_of("sglang==0.5.12", experts) == Scale(layer=1.2, prefill=3.0, compute=0.5)
    narrow = experts.placed(weight_dtype="mxfp4")
    assert constants.scale_of("", narrow) == Scale(layer=2.0, compute=0.5, prefill=4.0)


def test_engines_that_were_measured_have_their_factors_and_calibrated_costs_none() -> None:
    placed = {"model": "llama-3.1-8b", "device": "h200"}
    for engine in ("vllm", "sglang", "tensorrt-llm", "trtllm"):
        cost = make_config({**placed, "engine": engine}).cost
        assert cost.scale == shipped_constants().scale_of(cost_name(engine), cost)
        assert cost.scale not in (None, Scale())
        own = RooflineCost(llm="llama-3.1-8b", device="h200", step_us=300.0)
        assert make_config({**placed, "engine": engine, "cost": own}).cost.scale is None
    assert make_config(placed).cost.scale is None


def cost_name(engine: str) -> str:
    return {"trtllm": "tensorrt-llm"}.get(engine, engine)


def test_a_device_that_was_measured_has_its_factors_without_an_engine() -> None:
    slow = RooflineCost(llm="deepseek-v3", device="mi300x", tensor_parallel=8)
    plain = msgspec.structs.replace(slow, scale=Scale())
    assert all(slow.step_ns(each) > 1.2 * plain.step_ns(each) for each in BATCHES)
    assert RooflineCost(llm="deepseek-v3", device="tpu-v6e", tensor_parallel=8).held_out("open") == {}
