"""vLLM's start for a model on devices: settings by device, specs of layers, memory for KV, and the lines of its log.

A table stands for the attention backends: the blocks of tokens that their kernels take, and their memory orders. It was
compared with vLLM's own classes on devices of compute capability 8, 9 and 10 (tests/cost/of_vllm/test_start.py).

The memory is an interval with its parts, or the figure of a log: vLLM measures it. Available = share x total - weights
- peak of activations - CUDA graphs - what is not PyTorch's (v1/worker/gpu_worker.py, determine_available_memory). Only
weights can be counted; the bounds of the other parts enclose what public logs state (tests/cost/of_vllm/starts.toml).
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, lcm
from typing import Literal

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.number_formats import dtype_bits, is_fp8
from kvarts.cost.hardware.device import Device
from kvarts.cost.hardware.fit import local_weight_bytes
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.vllm.planning import LAYOUTS, LayerSpec, Plan, PlanSettings, Version, plan

__all__ = ["NEWEST", "Available", "Part", "Start", "StartSettings", "available_bytes", "parse_engine", "start"]

MIB, GIB = 1 << 20, 1 << 30
NEWEST: Version = "0.33"
DEFAULT_BLOCK = 16
UNSTATED_LENGTH = 2048
"""Length of a model whose config states none (config/model.py)."""


class StartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `vllm serve`; None for vLLM's default on the device.

    `data_parallel`: ranks that share experts. `context_parallel`: ranks of decode context parallelism, which share the
    tokens of a request. `max_model_len`: -1 for the longest that fits. `num_drafts`: tokens that are drafted, by layers
    such as MTP if `has_draft_layers`. `block_size`: the size that the user asks for. `num_blocks_override`: blocks,
    whatever the memory is. `ssm_dtype`: the format of recurrent states. `has_full_graphs`: CUDA graphs of whole
    decodes, which more sequences than blocks of states cannot have. `is_throughput`: vLLM's performance mode of that
    name.
    """

    version: Version = NEWEST
    tensor_parallel: int = 1
    data_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    memory_fraction: float = 0.92
    has_prefix_caching: bool = True
    has_async_scheduling: bool = True
    has_chunked_prefill: bool = True
    has_hybrid_manager: bool = True
    has_full_graphs: bool = True
    is_throughput: bool = False
    num_drafts: int = 0
    has_draft_layers: bool = True
    num_blocks_override: int | None = None
    ssm_dtype: str | None = None


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a start decides: settings as they come to be, and the plan.

    `block_size`: tokens of a block of attention. `state_padding`: the share that a state's page is longer than the
    state; None without states. `refusal`: vLLM's words where it does not build the model, else None; `longest`: the
    length that these name.
    """

    version: Version
    block_size: int
    state_padding: float | None
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_dtype: str
    specs: tuple[dict[str, LayerSpec], ...]
    settings: PlanSettings
    refusal: str | None = None
    longest: int | None = None

    def plan(self, available_bytes: int) -> Plan:
        """Return the plan with `available_bytes` for KV on each device, or the refusal before it."""
        if self.refusal is not None:
            return Plan(refusal=self.refusal, longest=self.longest)
        return plan(self.specs, [available_bytes] * len(self.specs), self.settings)

    def lines(self, planned: Plan, available_bytes: int | None = None) -> list[str]:
        """Return the lines that vLLM logs."""
        lines = []
        if self.state_padding is not None:
            lines.append(
                f"Setting attention block size to {self.block_size} tokens to ensure that attention page size is >= "
                "mamba page size."
            )
            if self.state_padding:
                lines.append(
                    f"Padding mamba page size by {100 * self.state_padding:.2f}% to ensure that mamba page size and "
                    "attention page size are exactly equal."
                )
        lines += [
            f"Add {missing} padding layers, may waste at most {100 * missing / whole:.2f}% KV cache memory"
            for missing, whole in _padding_layers(planned)
        ]
        if available_bytes is not None:
            lines.append(f"Available KV cache memory: {available_bytes / GIB:.2f} GiB")
        if planned.kv_cache_tokens is not None:
            lines.append(
                f"GPU KV cache size: {planned.kv_cache_tokens:,} tokens, Maximum concurrency for "
                f"{planned.max_model_len:,} tokens per request: {planned.max_concurrency:.2f}x"
            )
        if planned.refusal is not None:
            lines.append(planned.refusal)
        return lines


def _padding_layers(planned: Plan) -> list[tuple[int, int]]:
    """Return, for each kind of layers whose groups are not full, the layers that are missing, and its layers."""
    if planned.layout is None or planned.layout[0] == "B" or len(planned.groups) < 2:
        return []
    size = max(len(group.layers) for group in planned.groups)
    buckets: dict[object, int] = {}
    for group in planned.groups:
        key = group.kinds, group.window, group.block_size
        buckets[key] = buckets.get(key, 0) + len(group.layers)
    return [(-count % size, count) for count in buckets.values() if count % size]


def parse_engine(text: str) -> Version:
    """Return the version that `vllm`, `vllm==0.32` or `vllm==0.33.0` names. Raise ConfigError for others."""
    name, equals, version = text.partition("==")
    known: dict[str, Version] = {"": NEWEST, "0.33": "0.33", "0.33.0": "0.33", "0.32": "0.32", "0.32.0": "0.32"}
    if name != "vllm" or version not in known or bool(equals) != bool(version):
        raise ConfigError(
            f"{text!r} is not understood", field="engine", hint="Give vllm (0.33), vllm==0.33 or vllm==0.32."
        )
    return known[version]


# Settings -------------------------------------------------------------------------------------------------


def batch_defaults(device: Device, version: Version) -> tuple[int, int]:
    """Return vLLM's tokens a step and sequences for a server on a device (engine/arg_utils.py, get_batch_defaults)."""
    is_small = device.memory_bytes < 70 * GIB or "a100" in device.name
    if version != "0.32" and device.name == "gb10":
        is_small = True
    if is_small:
        return 2048, 256
    return (16_384 if device.memory_bytes >= 160 * GIB else 8192), 1024


def _batch(device: Device, settings: StartSettings, length: int) -> tuple[int, int]:
    """Return the tokens per step and the sequences of a server whose requests have at most `length` tokens."""
    tokens, seqs = batch_defaults(device, settings.version)
    if settings.is_throughput:
        tokens, seqs = 2 * tokens, 2 * seqs
    seqs = settings.max_num_seqs or seqs
    if settings.max_num_batched_tokens is not None:
        tokens = settings.max_num_batched_tokens
    else:
        tokens = min(tokens if settings.has_chunked_prefill else max(tokens, length), seqs * length)
    return tokens, settings.max_num_seqs or min(seqs, tokens)


class _Kernels(msgspec.Struct, frozen=True):
    """Tokens of a block that the kernels of all attention layers take.

    `preferred`: the block if the user asks for none; `smallest`: the least, of which a block has a multiple; `layouts`:
    memory orders, preferred first; `splits`: the kernel's blocks, if longer blocks are divided into them.
    """

    preferred: int = DEFAULT_BLOCK
    smallest: int = 16
    layouts: tuple[str, ...] = LAYOUTS
    splits: int | None = None


def _kernels(geometry: Geometry, capability: int, is_fp8_kv: bool) -> _Kernels:
    """Return the kernels that vLLM chooses on NVIDIA devices (platforms/cuda.py, _get_backend_priorities)."""
    if any(layer.own_dtype for layer in geometry.layers):  # DeepSeek V4
        return _Kernels(preferred=256, smallest=256, layouts=("BLHNC", "BLNHC"), splits=256)
    if geometry.sparse is not None and geometry.latent is not None:
        return _Kernels(preferred=64, smallest=64, splits=64)
    if any(layer.fixed_bytes for layer in geometry.layers):  # MiniMax M3's indexers
        return _Kernels(preferred=128, smallest=128)
    if geometry.latent is not None:
        return _latent_kernels(capability, is_fp8_kv)
    widths = {layer.head_numbers for layer in geometry.layers if layer.keeps_tokens}
    if capability == 10 and not geometry.has_sinks and 2 * geometry.head_dim in widths:
        return _Kernels(layouts=("LBHNC", "BLHNC"), splits=64)
    if capability == 9 and is_fp8_kv and max(widths) > 512:
        return _Kernels(preferred=64, smallest=64)
    return _Kernels()


def _latent_kernels(capability: int, is_fp8_kv: bool) -> _Kernels:
    if capability == 10:
        return _Kernels(preferred=32, smallest=32, splits=64)
    if capability == 9 and is_fp8_kv:
        return _Kernels(preferred=64, smallest=64, splits=64)
    return _Kernels()


def _backend_refusal(geometry: Geometry, device: Device, is_fp8_kv: bool) -> str | None:
    """Return vLLM's words if no attention backend of a device of capability 8 takes the model, else None."""
    if device.capability != 8 or any(layer.own_dtype for layer in geometry.layers):
        return None
    if geometry.sparse is not None and geometry.latent is not None:
        return "No valid attention backend found for cuda with AttentionSelectorConfig(use_mla=True, use_sparse=True)"
    widths = {layer.head_numbers for layer in geometry.layers if layer.keeps_tokens}
    needs_triton = geometry.has_sinks or max(widths) > 512 or 2 * geometry.head_dim not in widths
    if is_fp8_kv and "fp8" not in device.tflops and (geometry.latent is not None or needs_triton):
        backend = "Triton MLA backend" if geometry.latent is not None else "Triton attention backend"
        capability = "8.0" if "a100" in device.name else "8.6"
        return (
            f"FP8 KV cache is not supported by the {backend} on {device.name} (compute capability {capability}); "
            "native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype bfloat16."
        )
    return None


def _context_refusal(geometry: Geometry, settings: StartSettings) -> str | None:
    """Return vLLM's message if ranks cannot share the tokens of KV heads that each device has whole, else None."""
    ways, shared, heads = settings.tensor_parallel, settings.context_parallel, geometry.num_kv_heads
    if shared == 1 or geometry.latent is not None:
        return None
    if ways <= heads:
        return (
            f"Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` ({ways}) to be greater than the "
            f"model's total number of KV heads ({heads}). Increase `--tensor-parallel-size` or set "
            "`--decode-context-parallel-size 1`."
        )
    if shared > ways // heads:
        return (
            f"`--decode-context-parallel-size` ({shared}) exceeds the maximum supported value ({ways // heads}) for "
            f"`--tensor-parallel-size` ({ways}) and {heads} model KV heads."
        )
    if geometry.num_heads // heads % shared:
        return (
            f"The model's number of query heads per KV head ({geometry.num_heads // heads}) must be divisible by "
            f"`--decode-context-parallel-size` ({shared}) for GQA/MQA."
        )
    return None


def _length_refusal(geometry: Geometry, length: int) -> str | None:
    """Return vLLM's message for a length above that of the model, else None."""
    most = geometry.most_model_len
    if most is None or length <= most:
        return None
    return (
        f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
        f"(max_position_embeddings={float(most)} or model_max_length=None in model's config.json). To allow overriding "
        "this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1."
    )


def _groups_refusal(geometry: Geometry, tensor_parallel: int) -> str | None:
    """Return vLLM's message for groups of Mamba-2 that devices neither divide nor each have whole, else None."""
    num_groups = 0 if geometry.state is None else geometry.state.num_groups
    if num_groups < 2 or not num_groups % tensor_parallel:
        return None
    return "If tensor parallel world size does not divide num_groups, then num_groups must equal 1."


def start(geometry: Geometry, device: Device, settings: StartSettings) -> Start:
    """Return what vLLM decides before it measures memory. Raise ConfigError for settings that it cannot have.

    `geometry`: the model as engines keep its KV on the device (`Geometry.on`).
    """
    capability = device.capability or 9
    version, ways = settings.version, settings.tensor_parallel
    stated = geometry.max_model_len or UNSTATED_LENGTH
    fits_length = settings.max_model_len == -1
    length = stated if settings.max_model_len is None or fits_length else settings.max_model_len
    if length < 1:
        raise ConfigError(f"must be at least 1, or -1 for the longest that fits, got {length}", field="max_model_len")
    if ways % settings.context_parallel:
        raise ConfigError(
            f"must be a divisor of tensor_parallel, got {settings.context_parallel} with {ways}",
            field="context_parallel",
        )
    too_long = _length_refusal(geometry, length)
    tokens, seqs = _batch(device, settings, length)
    if settings.ssm_dtype is not None and geometry.state is not None:
        state = msgspec.structs.replace(geometry.state, recurrent_dtype=settings.ssm_dtype)
        geometry = msgspec.structs.replace(geometry, state=state)
    kept = geometry.kept_as(settings.kv_dtype)
    kernels = _kernels(geometry, capability, is_fp8(kept))
    block_size = settings.block_size or kernels.preferred
    if block_size % kernels.smallest:
        raise ConfigError(
            f"is {block_size}, and the attention kernels of {geometry.name} on {device.name} take multiples of "
            f"{kernels.smallest} tokens",
            field="page_size",
            hint=f"vLLM refuses that, too. Leave it out, or give {kernels.preferred}.",
        )
    grid = _checkpoint_grid(geometry, capability, version) if settings.has_prefix_caching else None
    has_states = any(layer.kind == "state" for layer in geometry.layers)
    state_bytes = 0
    if has_states:
        state_bytes = _state_bytes(geometry, ways, settings.num_drafts)
        block_size = _aligned_block(geometry, kernels, block_size, state_bytes, kept, ways, grid)
    layers = _specs(geometry, settings, kernels, block_size, kept, grid, length)
    pages = [spec.page_bytes for spec in layers.values() if spec.kind == "state"]
    stages = _stages(layers, geometry.num_layers, settings.pipeline_parallel)
    in_flight = settings.pipeline_parallel + 1 if settings.has_async_scheduling else settings.pipeline_parallel
    return Start(
        version=version,
        block_size=block_size,
        state_padding=pages[0] / state_bytes - 1 if has_states else None,
        max_model_len=length,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        kv_dtype=next((layer.own_dtype for layer in geometry.layers if layer.own_dtype), kept),
        specs=tuple(stages),
        refusal=too_long
        or _context_refusal(geometry, settings)
        or _groups_refusal(geometry, ways)
        or _backend_refusal(geometry, device, is_fp8(kept)),
        longest=None if too_long is None else geometry.most_model_len,
        settings=PlanSettings(
            version=version,
            max_model_len=length,
            tokens_in_flight=tokens * in_flight,
            max_num_seqs=seqs,
            layouts=kernels.layouts,
            state_mode="align" if settings.has_prefix_caching else "none",
            fits_length=fits_length,
            has_hybrid_manager=settings.has_hybrid_manager,
            context_parallel=settings.context_parallel,
            num_blocks_override=settings.num_blocks_override,
            checks_states=settings.has_full_graphs,
        ),
    )


# States ---------------------------------------------------------------------------------------------------


def _checkpoint_grid(geometry: Geometry, capability: int, version: Version) -> int | None:
    """Return the grid of tokens on which prefill exports states; None where it exports none.

    Mamba-2 exports anywhere, Kimi Delta Attention on Hopper each 16 tokens; gated delta nets since 0.33 each 64 tokens
    where FlashInfer computes their prefill (model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py).
    """
    kind = None if geometry.state is None else geometry.state.kind
    if kind == "gdn":
        return 64 if version != "0.32" and capability in (9, 10, 12) else None
    if kind == "kda":
        return 16 if capability in (9, 10) else None
    return 1 if kind == "mamba2" else None


def _state_bytes(geometry: Geometry, tensor_parallel: int, num_drafts: int) -> int:
    """Return the bytes of one layer's state of a request on one device."""
    if geometry.state is not None:
        return geometry.state.local_bytes(geometry.dtype, tensor_parallel, num_drafts)
    return max(-(-layer.state_bytes // tensor_parallel) for layer in geometry.layers)


def _aligned_block(
    geometry: Geometry,
    kernels: _Kernels,
    block_size: int,
    state_bytes: int,
    kept: str,
    tensor_parallel: int,
    grid: int | None,
) -> int:
    """Return the block of attention in which a state has room (platforms/interface.py, _align_hybrid_block_size)."""
    first = next(layer for layer in geometry.layers if layer.keeps_tokens)
    token_bytes = _entry_bytes(first, kept) * _local_heads(first, tensor_parallel)
    step = max(kernels.smallest, block_size, 128 if geometry.latent is not None else 0)
    step = lcm(step, grid or 1)
    wanted = step * -(-state_bytes // (step * token_bytes))
    wanted = -(-wanted // kernels.smallest) * kernels.smallest
    return max(block_size, wanted)


# Specs ----------------------------------------------------------------------------------------------------


def _local_heads(layer: KvLayer, tensor_parallel: int) -> int:
    return 1 if layer.num_vectors == 1 else max(1, layer.num_heads // tensor_parallel)


def _entry_bytes(layer: KvLayer, kept: str) -> int:
    """Return the bytes of a head of a stored entry."""
    kept = layer.own_dtype or kept
    if layer.packed_bytes is not None and is_fp8(kept):
        return layer.packed_bytes
    whole = Fraction(layer.head_numbers * dtype_bits(kept, field="kv_dtype"))
    if kept in ("int8", "fp8_per_token_head"):  # a scale in 32 bits for each vector
        whole += 32 * layer.num_vectors
    return -(-whole.numerator // (8 * whole.denominator))


def _specs(
    geometry: Geometry,
    settings: StartSettings,
    kernels: _Kernels,
    block_size: int,
    kept: str,
    grid: int | None,
    max_model_len: int,
) -> dict[str, LayerSpec]:
    """Return the spec of each layer that keeps KV, in the order in which vLLM registers them.

    A state has the block of attention, or with no prefix cache one of `max_model_len` tokens.
    """
    specs: dict[str, LayerSpec] = {}
    token_pages: int | None = None
    is_packed = any(layer.own_dtype for layer in geometry.layers)
    ways = settings.tensor_parallel
    layers = list(enumerate(geometry.layers))
    layers += [
        (geometry.num_layers + index, geometry.draft)
        for index in range(bool(settings.num_drafts) and settings.has_draft_layers)
        if geometry.draft
    ]
    for index, layer in layers:
        if layer.keeps_tokens:
            if layer.fixed_bytes:
                key = KvLayer(
                    kind="latent", num_heads=1, num_vectors=1, packed_bytes=layer.fixed_bytes, own_dtype="fp8"
                )
                specs[f"{index}.indexer"] = _spec_of(key, kernels, block_size, kept, 1, "indexer")
            specs[f"{index}"] = _window_of_v4(layer) if is_packed else _spec_of(layer, kernels, block_size, kept, ways)
            if token_pages is None:
                token_pages = specs[f"{index}"].page_bytes
    if is_packed:
        return specs | _compressed(geometry.caches, block_size)
    state_bytes = _state_bytes(geometry, ways, settings.num_drafts) if geometry.state_bytes else 0
    state = LayerSpec(
        kind="state",
        block_size=block_size if settings.has_prefix_caching else max_model_len,
        state_bytes=state_bytes,
        padded_bytes=token_pages if token_pages is not None and token_pages > state_bytes else None,
        num_drafts=settings.num_drafts,
        num_checkpoints=int(grid is not None),
        is_sharded=False,
    )
    for index, layer in layers:
        if layer.kind == "state":
            specs[f"{index}"] = state
    order = {name: place for place, name in enumerate(specs)}
    return {name: specs[name] for name in sorted(specs, key=lambda name: (int(name.split(".")[0]), order[name]))}


def _spec_of(
    layer: KvLayer, kernels: _Kernels, block_size: int, kept: str, tensor_parallel: int, role: str = ""
) -> LayerSpec:
    kinds: dict[str, Literal["full", "mla", "window", "chunk"]] = {"full": "full", "window": "window", "chunk": "chunk"}
    entry = _entry_bytes(layer, kept)
    return LayerSpec(
        kind=kinds.get(layer.kind, "mla"),
        block_size=block_size,
        num_heads=_local_heads(layer, tensor_parallel),
        entry_bytes=entry,
        kernel_block=kernels.splits if layer.kind != "window" else None,
        window=layer.span if layer.kind == "window" else None,
        chunk=layer.span if layer.kind == "chunk" else None,
        cell=f"{layer.head_numbers} {layer.own_dtype or kept}",
        form=role,
    )


_V4_ALIGNMENT = 576


def _window_of_v4(layer: KvLayer) -> LayerSpec:
    """Return the spec of DeepSeek V4's windows: blocks of 64 tokens, pages in units of 576 bytes."""
    return LayerSpec(
        kind="window_mla",
        block_size=64,
        entry_bytes=layer.packed_bytes or 0,
        alignment=_V4_ALIGNMENT,
        window=layer.span,
        cell="swa",
        form="fp8_ds_mla",
    )


def _compressed(caches: tuple[KvLayer, ...], block_size: int) -> dict[str, LayerSpec]:
    """Return the specs of DeepSeek V4's compressed tokens, indexers' keys and partial states, layer by layer.

    A layer's caches start with its compressed tokens; vLLM registers the indexer's before them.
    """
    layers: list[list[KvLayer]] = []
    for cache in caches:
        if cache.kind == "full" and (not layers or cache.head_numbers >= layers[-1][0].head_numbers):
            layers.append([cache])
        else:
            layers[-1].append(cache)
    specs: dict[str, LayerSpec] = {}
    for index, own in enumerate(layers):
        ordered = own if len(own) == 2 else [own[1], own[3], own[0], own[2]]
        for place, cache in enumerate(ordered):
            is_state = cache.kind == "window"
            entry = cache.packed_bytes if not is_state else 4 * cache.head_numbers
            specs[f"compressed.{index}.{place}"] = LayerSpec(
                kind="window_mla" if is_state else "mla",
                block_size=(4 if (cache.span or 0) < 128 else 8) if is_state else block_size,
                entry_bytes=entry or 0,
                tokens_per_entry=cache.every,
                alignment=_V4_ALIGNMENT,
                kernel_block=None if is_state else 256,
                window=cache.span,
                cell=f"{cache.head_numbers}",
            )
    return specs


def _stages(specs: dict[str, LayerSpec], num_layers: int, num_stages: int) -> list[dict[str, LayerSpec]]:
    """Return the layers of each pipeline stage: even parts, the rest from the last stage but one backwards."""
    if num_stages == 1:
        return [specs]
    if any(name.startswith("compressed") for name in specs):
        raise ConfigError("is not planned for models with compressed KV", field="pipeline_parallel")
    counts = [num_layers // num_stages] * num_stages
    for place in range(2, num_layers % num_stages + 2):
        counts[-place] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(num_stages)]
    stages: list[dict[str, LayerSpec]] = [{} for _ in counts]
    for name, spec in specs.items():
        index = int(name.split(".")[0])
        stages[next((stage for stage, end in enumerate(ends) if index < end), num_stages - 1)][name] = spec
    return stages


# Memory ---------------------------------------------------------------------------------------------------


class Part(msgspec.Struct, frozen=True):
    """A part of the memory of one device, in bytes."""

    name: str
    least: int
    most: int


class Available(msgspec.Struct, frozen=True):
    """Bytes for KV on one device, at least and at most. `parts`: the memory and what it is used for; none if given."""

    least: int
    most: int
    parts: tuple[Part, ...] = ()

    @classmethod
    def exactly(cls, size_bytes: int) -> Available:
        """Return the figure of a log."""
        return cls(size_bytes, size_bytes)

    def lines(self) -> list[str]:
        """Return the interval and its parts as text, in GiB."""
        if not self.parts:
            return [f"{self.least / GIB:.2f} GiB, as given"]
        total, *used = self.parts
        text = f"{self.least / GIB:.2f} to {self.most / GIB:.2f} GiB: {_range(total)} to use"
        return [text, *(f"- {_range(part)} {part.name}" for part in used)]

    def values(self) -> dict[str, object]:
        """Return the JSON fields."""
        parts = {part.name: {"least_bytes": part.least, "most_bytes": part.most} for part in self.parts}
        return {"least_bytes": self.least, "most_bytes": self.most, "parts": parts}


def _range(part: Part) -> str:
    low, high = f"{part.least / GIB:.2f}", f"{part.most / GIB:.2f}"
    return low if low == high else f"{low} to {high}"


def available_bytes(geometry: Geometry, device: Device, settings: StartSettings, start: Start) -> Available:
    """Return the bytes that vLLM leaves for KV on each device of a model.

    Activations: those of a step of the most tokens, and the logits and sampling buffers of the most sequences.
    """
    usable = device.usable_bytes
    parts = (
        Part("to use", *(ceil(size * settings.memory_fraction) for size in usable)),
        _weights(geometry, settings),
        _activations(geometry, settings, start),
        _graphs(geometry),
        Part("NCCL", *((0, 0) if settings.tensor_parallel * settings.pipeline_parallel == 1 else (150 * MIB, 2 * GIB))),
        Part("context", 0, 900 * MIB),
    )
    least = parts[0].least - sum(part.most for part in parts[1:])
    most = parts[0].most - sum(part.least for part in parts[1:])
    return Available(least, most, parts)


def _weights(geometry: Geometry, settings: StartSettings) -> Part:
    """Return the weights: at least those counted; at most with a vision tower and what loaders add."""
    size = local_weight_bytes(geometry, settings.tensor_parallel, settings.data_parallel, settings.pipeline_parallel)
    return Part("weights", int(size * 0.98), int(size * 1.02) + 5 * GIB // 4)


def _activations(geometry: Geometry, settings: StartSettings, start: Start) -> Part:
    """Return the peak of the profile batch."""
    number = float(dtype_bits(geometry.dtype, field="dtype")) / 8
    width = geometry.intermediate_size
    if geometry.experts is not None:
        experts = geometry.experts
        width = max(width if geometry.num_dense_layers else 0, experts.per_token * experts.intermediate_size)
    token = (
        2 * geometry.hidden_size + (geometry.num_heads * geometry.head_dim + width) / settings.tensor_parallel
    ) * number
    step = start.max_num_batched_tokens * token
    logits = 4 * start.max_num_seqs * geometry.vocab_size
    return Part("activations", int(step / 2), int(3 * step + 2 * logits) + 400 * MIB)


def _graphs(geometry: Geometry) -> Part:
    """Return the CUDA graphs of the sizes that vLLM captures."""
    return Part("CUDA graphs", 0, 350 * MIB + geometry.num_layers * 20 * MIB)
