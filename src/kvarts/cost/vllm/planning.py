"""vLLM's planning of KV memory: from what each layer keeps to groups, blocks and tokens, or a refusal.

Pure functions over specs, without vLLM; a restatement of `v1/core/kv_cache_planning.py` of vLLM 0.33 and of the same
functions in `v1/core/kv_cache_utils.py` of 0.32, with the specs of `v1/kv_cache_interface.py`. Nothing here knows
models, devices or requests. Not restated: hidden-state caches, HiSparse, caches of encoders, plug-in builders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import gcd, lcm
from typing import Literal

import msgspec

__all__ = ["LAYOUTS", "LayerSpec", "Plan", "PlanGroup", "PlanSettings", "SpecKind", "Version", "plan"]

SpecKind = Literal["full", "mla", "window", "window_mla", "chunk", "state", "ring", "cross"]
Version = Literal["0.32", "0.33"]
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""Memory orders of layers (L), blocks (B), heads (H), tokens (N) and content (C), as vLLM prefers them."""
_FULL = ("full", "mla")
_WINDOWS = ("window", "window_mla")
_GIB = 1 << 30


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer keeps, as a KVCacheSpec of vLLM.

    Attention: a block has `num_heads` x (`block_size` / `tokens_per_entry`) entries of `entry_bytes`; `window` and
    `chunk` are spans in tokens, also of layers that are counted as full attention. A state: `state_bytes`, whatever
    `block_size` is, with `num_drafts` and `num_checkpoints` further states per request. `padded_bytes`: size of a page
    that is larger than its content; `alignment`: the unit that pages of MLA are rounded up to. `stride_unit`: bytes
    that the distance of two blocks is a multiple of; `kernel_block`: most tokens of a kernel's block, for layers whose
    blocks are divided into whole kernel blocks. `cell` and `form` keep layers apart that cannot share a block table:
    number formats, sizes of heads, roles. `is_sharded`: whether ranks of decode context parallelism divide its tokens.
    """

    kind: SpecKind
    block_size: int
    num_heads: int = 1
    entry_bytes: int = 0
    tokens_per_entry: int = 1
    padded_bytes: int | None = None
    alignment: int | None = None
    stride_unit: int | None = None
    kernel_block: int | None = None
    window: int | None = None
    chunk: int | None = None
    num_retained: int = 0
    state_bytes: int = 0
    num_drafts: int = 0
    num_checkpoints: int = 0
    cell: str = ""
    form: str = ""
    is_sharded: bool = True

    def __post_init__(self) -> None:
        if self.alignment is not None:
            rounded = _rounded_up(self.content_bytes, self.alignment)
            if rounded != self.content_bytes:
                msgspec.structs.force_setattr(self, "padded_bytes", rounded)

    @property
    def num_entries(self) -> int:
        """Stored entries of a block, per head."""
        return 1 if self.kind == "state" else self.block_size // self.tokens_per_entry

    @property
    def content_bytes(self) -> int:
        """Bytes of a page without padding."""
        if self.kind == "state":
            return self.state_bytes
        return self.num_heads * self.num_entries * self.entry_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a block of the layer. Raises RefusedError if the padded size is below the content."""
        if self.padded_bytes is None:
            return self.content_bytes
        _assure(self.padded_bytes >= self.content_bytes, "a padded page is smaller than its content")
        return self.padded_bytes

    @property
    def block_unit(self) -> int:
        """Bytes that the distance of two blocks is a multiple of."""
        if self.kernel_block is None:
            return self.stride_unit or 1
        block = gcd(self.kernel_block, self.block_size)
        return 1 if block == self.block_size else _changed(self, block_size=block).page_bytes


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of vLLM that planning reads, with vLLM's defaults.

    `layouts`: memory orders that the attention backends support, preferred first; `layout`: the one that
    VLLM_KV_CACHE_LAYOUT names. `tokens_in_flight`: tokens of all steps that may be in flight. `num_retained`: tokens
    kept below each window for chained draft layers. `state_mode`: vLLM's mamba_cache_mode. `fits_length`: whether
    `max_model_len` is only the upper bound of the length that fits (vLLM's -1). `checks_states`: whether more
    sequences than blocks are refused, as with full CUDA graphs.
    """

    max_model_len: int
    tokens_in_flight: int
    max_num_seqs: int = 1024
    version: Version = "0.33"
    layouts: tuple[str, ...] = LAYOUTS
    layout: str | None = None
    has_hybrid_manager: bool = True
    state_mode: Literal["align", "none"] = "align"
    context_parallel: int = 1
    num_retained: int = 0
    max_encoder_tokens: int = 0
    num_blocks_override: int | None = None
    fits_length: bool = False
    checks_states: bool = True


class PlanGroup(msgspec.Struct, frozen=True):
    """Layers with one block table: their indices, and bytes of a block of all of them without the block's padding.

    Of a pipeline, `layers` are those of the first stage, which may be none. `kinds`: the kinds of spec in it.
    `blocks_per_request`: blocks of a request of the maximum length.
    """

    kinds: tuple[SpecKind, ...]
    layers: tuple[str, ...]
    block_size: int
    page_bytes: int
    blocks_per_request: int
    window: int | None
    chunk: int | None


class Plan(msgspec.Struct, frozen=True):
    """A plan of vLLM, or its refusal.

    `num_blocks` includes the null block. `block_bytes`: bytes of a block id on the first rank. `refusal`: vLLM's
    words, or None; the other fields are those of a plan as far as it came. `longest`: the length that would fit.
    """

    refusal: str | None = None
    layout: str | None = None
    groups: tuple[PlanGroup, ...] = ()
    num_blocks: int | None = None
    block_bytes: int | None = None
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    longest: int | None = None


class RefusedError(Exception):
    """vLLM's refusal, with its words. `longest`: the length that its message names."""

    def __init__(self, words: str, longest: int | None = None) -> None:
        super().__init__(words)
        self.words = words
        self.longest = longest


class _UnequalError(Exception):
    """Pages that cannot be made equal."""


def _assure(is_true: bool, words: str) -> None:
    """Refuse where vLLM has an assertion."""
    if not is_true:
        raise RefusedError(f"AssertionError: {words}")


def _rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _changed(spec: LayerSpec, **fields: int | str | None) -> LayerSpec:
    return msgspec.structs.replace(spec, **fields)


# Groups ---------------------------------------------------------------------------------------------------


class _Group:
    """Layers with one block table: each with its own spec, or all with one that was merged."""

    __slots__ = ("merged", "names", "specs")

    def __init__(self, names: Sequence[str], specs: Mapping[str, LayerSpec], merged: LayerSpec | None = None) -> None:
        self.names = list(names)
        self.specs = {name: specs[name] for name in names} if merged is None else {}
        self.merged = merged

    def spec_of(self, name: str) -> LayerSpec:
        return self.specs[name] if self.merged is None else self.merged

    @property
    def first(self) -> LayerSpec:
        return next(iter(self.specs.values())) if self.merged is None else self.merged

    @property
    def all_specs(self) -> Sequence[LayerSpec]:
        return list(self.specs.values()) if self.merged is None else [self.merged]

    def on(self, names: Mapping[str, LayerSpec]) -> _Group:
        """Return the group on a rank that has the layers `names`."""
        own = [name for name in self.names if name in names]
        if self.merged is None and own:
            return _Group(own, self.specs)
        part = _Group(self.names, self.specs, self.merged)
        part.names = own
        return part


def _merged(specs: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return the spec of layers that share a block table and a page, or None if they cannot.

    Raise RefusedError if two full-attention layers have different windows, as vLLM does. All fields are compared; for
    full attention all except spans; for windows of MLA the format and the span, and not the size of the page.
    """
    first = specs[0]
    if any(spec.kind != first.kind for spec in specs):
        return None
    if first.kind == "full":
        windows = {spec.window for spec in specs if spec.window is not None}
        chunks = {spec.chunk for spec in specs if spec.chunk is not None}
        if len(windows) > 1 or len(chunks) > 1:
            raise RefusedError("All attention layers in the same KV cache group must have the same window size.")
        window, chunk = next(iter(windows), None), next(iter(chunks), None)
        plain = [_changed(spec, window=None, chunk=None) for spec in specs]
        if any(spec != plain[0] for spec in plain) or (window is not None and chunk is not None):
            return None
        return _changed(first, window=window, chunk=chunk)
    if first.kind == "mla":
        plain = [_changed(spec, window=None, chunk=None, alignment=None) for spec in specs]
        return plain[0] if all(spec == plain[0] for spec in plain) else None
    if first.kind == "window_mla":
        is_one = all(_of_window_mla(spec) == _of_window_mla(first) for spec in specs)
        return _changed(first, alignment=None) if is_one else None
    return first if all(spec == first for spec in specs) else None


def _of_window_mla(spec: LayerSpec) -> tuple[object, ...]:
    stride = spec.stride_unit, spec.kernel_block
    return spec.form, spec.tokens_per_entry, spec.window, spec.num_retained, stride, spec.is_sharded


def _is_one_type(specs: Mapping[str, LayerSpec]) -> bool:
    """Return whether all layers always need the same number of blocks of a request, whatever their pages are."""
    all_specs = list(specs.values())
    first = all_specs[0]
    if len({spec.block_size for spec in all_specs}) > 1 or len({spec.is_sharded for spec in all_specs}) > 1:
        return False
    kinds = {spec.kind for spec in all_specs}
    if first.kind in _FULL:
        return kinds <= set(_FULL)
    if first.kind in _WINDOWS:
        known = _WINDOWS if first.kind == "window" else ("window_mla",)
        return kinds <= set(known) and len({spec.window for spec in all_specs}) == 1
    if first.kind == "chunk":
        return kinds == {"chunk"} and len({spec.chunk for spec in all_specs}) == 1
    if first.kind == "state":
        alike = {(spec.num_drafts, spec.num_checkpoints, spec.page_bytes) for spec in all_specs if spec.kind == "state"}
        return kinds == {"state"} and len(alike) == 1
    return kinds == {first.kind}


def _counted_as_full(specs: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Return the layers with windows and chunks counted as full attention.

    Raise RefusedError if that does not make them one type.
    """
    promoted = dict(specs)
    if _merged(list(promoted.values())) is not None or _is_one_type(promoted):
        return promoted
    kinds = {spec.kind for spec in specs.values()}
    if kinds & set(_FULL) and kinds & {"window", "window_mla", "chunk"}:
        blocks = {spec.block_size for spec in specs.values() if spec.kind in _FULL}
        for name, spec in specs.items():
            if spec.kind not in ("window", "window_mla", "chunk"):
                continue
            if spec.kind == "window_mla":
                raise RefusedError("MLAAttentionSpec.__init__() got an unexpected keyword argument 'bounded_replay'")
            block_size = next(iter(blocks)) if len(blocks) == 1 else spec.block_size
            padded = spec.padded_bytes
            if padded is not None:
                padded = max(padded, spec.content_bytes * block_size // spec.block_size)
            promoted[name] = _changed(spec, kind="full", block_size=block_size, padded_bytes=padded, num_retained=0)
    if _merged(list(promoted.values())) is None and not _is_one_type(promoted):
        raise RefusedError("Failed to promote local KV cache specs to one unified type.")
    return promoted


def _groups(specs: dict[str, LayerSpec], layout: str, has_hybrid_manager: bool) -> list[_Group]:
    """Return the groups of all layers of a model. Raise RefusedError as vLLM does."""
    if not has_hybrid_manager:
        for is_sharded in dict.fromkeys(_is_shared_out(spec) for spec in specs.values()):
            own = {name: spec for name, spec in specs.items() if _is_shared_out(spec) == is_sharded}
            specs = {**specs, **_counted_as_full(own)}
    if not specs:
        return []
    merged = _merged(list(specs.values()))
    if merged is not None:
        return [_Group(list(specs), specs, merged)]
    if _is_one_type(specs):
        return [_Group(list(specs), specs)]
    if layout[0] == "B" and len({spec.page_bytes for spec in specs.values()}) > 1:
        return _packed(specs)
    try:
        return _of_equal_pages(_with_equal_pages(specs))
    except _UnequalError as error:
        groups = _all_full(specs)
        if groups is None:
            raise RefusedError(str(error)) from error
        return groups


def _is_shared_out(spec: LayerSpec) -> bool:
    return spec.kind == "state" or spec.is_sharded


def _all_full(specs: dict[str, LayerSpec]) -> list[_Group] | None:
    """Return one group in which windows next to MLA are counted as full attention; None if there is no such group."""
    kinds = {spec.kind for spec in specs.values()}
    if kinds & {"window_mla", "chunk"} or not {"mla", "window"} <= kinds:
        return None
    try:
        promoted = _counted_as_full(specs)
    except RefusedError:
        return None
    return [_Group(list(promoted), promoted)] if _is_one_type(promoted) else None


def _with_equal_pages(specs: dict[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Return the layers with pages of one size: longer blocks where the sizes divide, else padding.

    Raise _UnequalError for a page of MLA that does not divide the largest.
    """
    largest = max(spec.page_bytes for spec in specs.values())
    equal: dict[str, LayerSpec] = {}
    for name, spec in specs.items():
        if spec.page_bytes == largest:
            equal[name] = spec
            continue
        if spec.kind == "state":
            changed = _changed(spec, padded_bytes=largest)
        elif largest % spec.page_bytes == 0:
            changed = _changed(spec, block_size=spec.block_size * (largest // spec.page_bytes))
        elif spec.kind != "mla":
            changed = _changed(spec, padded_bytes=largest)
        else:
            raise _UnequalError(
                f"Layer {name}: page size is not divisible by the maximum page size and cannot be padded. "
                "Padding is only supported for non-MLA attention layers."
            )
        _assure(changed.page_bytes == largest, "pages are not equal")
        equal[name] = changed
    return equal


def _of_equal_pages(specs: dict[str, LayerSpec]) -> list[_Group]:
    """Return groups with the same number of layers each, by the most layers that waste few pages."""
    by_spec: dict[LayerSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    buckets: list[tuple[list[LayerSpec], list[str]]] = []
    for spec, names in by_spec.items():
        for known, members in buckets:
            try:
                merged = _merged([*known, spec])
            except RefusedError:
                continue
            if merged is not None:
                members.extend(names)
                known.append(spec)
                break
        else:
            buckets.append(([spec], list(names)))
    fewest = min(len(names) for _, names in buckets)
    most = max(len(names) for _, names in buckets)
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for _, names in buckets:
        num_groups = -(-len(names) // size)
        for index in range(num_groups):
            members = names[index::num_groups]
            merged = _merged([specs[name] for name in members])
            assert merged is not None
            groups.append(_Group(members, specs, merged))
    return groups


# Packed pages ---------------------------------------------------------------------------------------------


class _Bucket:
    """Layers of one type, by the sizes of their pages."""

    __slots__ = ("by_page", "is_balanced", "repeats", "specs")

    def __init__(self, specs: dict[str, LayerSpec]) -> None:
        self.specs = specs
        self.by_page: dict[int, list[str]] = {}
        for name, spec in specs.items():
            self.by_page.setdefault(spec.page_bytes, []).append(name)
        counts = [len(names) for names in self.by_page.values()]
        self.is_balanced = len(set(counts)) == 1
        self.repeats = max(counts)

    def widest_bytes(self, num_groups: int) -> int:
        return sum(-(-len(names) // num_groups) * page for page, names in self.by_page.items())


def _packed(specs: dict[str, LayerSpec]) -> list[_Group]:
    """Return groups whose layers lie side by side in a block, each with a page of its own size."""
    collected: list[dict[str, LayerSpec]] = []
    for name, spec in specs.items():
        for own in collected:
            if _is_one_type({**own, name: spec}):
                own[name] = spec
                break
        else:
            collected.append({name: spec})
    buckets = [_Bucket(own) for own in collected]
    floor = max((one.repeats for one in buckets if one.is_balanced and len(one.by_page) > 1), default=0)
    repeats = _least_padding([one.repeats for one in buckets if one.is_balanced], floor) if floor else None

    def num_groups(one: _Bucket) -> int:
        return -(-one.repeats // repeats) if one.is_balanced and repeats is not None else 1

    def has_states(one: _Bucket) -> bool:
        kind = next(iter(one.specs.values())).kind
        return kind in ("state", "ring") or (repeats is None and kind in _WINDOWS)

    widest = max(one.widest_bytes(len(one.specs) if has_states(one) else num_groups(one)) for one in buckets)
    groups: list[_Group] = []
    for one in buckets:
        count = num_groups(one)
        if has_states(one):
            per_block = max(widest // next(iter(one.specs.values())).page_bytes, 1)
            count = max(count, -(-len(one.specs) // per_block))
        if count == 1:
            groups.append(_Group(list(one.specs), one.specs))
            continue
        rows = list(zip(*one.by_page.values(), strict=False))
        _assure(len(rows) >= count, "a group has no layers")
        groups += [_Group([name for row in rows[index::count] for name in row], one.specs) for index in range(count)]
    return groups


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """Return the number of at least `floor` that wastes least if all counts are rounded up to it; the larger of two."""
    most = max(counts)
    if floor > most:
        return floor
    return min(range(floor, most + 1), key=lambda size: (sum(-count % size for count in counts), -size))


# Memory ---------------------------------------------------------------------------------------------------


def _layout(specs: Sequence[LayerSpec], settings: PlanSettings) -> str:
    """Return the memory order of all layers. Raise RefusedError if no order of the backends has room for them."""
    candidates = list(settings.layouts)
    if len({(spec.num_heads, spec.num_entries, spec.page_bytes) for spec in specs}) > 1:
        candidates = [name for name in candidates if set(name[:2]) == {"L", "B"}]
        if not candidates:
            raise RefusedError(
                "Specs with mixed HNC shapes need a block-compact layout, but none is in every supported set: "
                f"{list(settings.layouts)}."
            )
    sharded = {spec.is_sharded for spec in specs if spec.kind not in ("state", "ring")}
    if len(sharded) > 1 and len({spec.page_bytes for spec in specs}) > 1:
        candidates = [name for name in candidates if name[0] == "B"]
        if not candidates:
            raise RefusedError(
                "DCP with a replicated draft and mixed KV page sizes requires a block-outer KV cache layout; "
                f"supported sets: {list(settings.layouts)}."
            )
    if settings.layout is None:
        return candidates[0]
    wanted = {"NHD": "LBNHC", "HND": "LBHNC"}.get(settings.layout, settings.layout)
    if wanted not in candidates:
        raise RefusedError(
            f"VLLM_KV_CACHE_LAYOUT={settings.layout} does not satisfy every supported set; valid layouts: {candidates}."
        )
    return wanted


def _block_bytes(groups: Sequence[_Group], layout: str) -> int:
    """Return the bytes of a block id: those of the widest group."""
    if layout[0] != "B":
        return max(
            sum(_rounded_up(group.spec_of(name).page_bytes, group.spec_of(name).block_unit) for name in group.names)
            for group in groups
        )
    widest = max(sum(group.spec_of(name).page_bytes for name in group.names) for group in groups)
    _assure(widest > 0, "a block has no bytes")
    return _rounded_up(widest, lcm(*(group.spec_of(name).block_unit for group in groups for name in group.names)))


def _check_layout(of_ranks: Sequence[Sequence[_Group]], layout: str, num_layers: int) -> None:
    """Raise RefusedError if pages of these sizes cannot be laid out in this order, on some rank.

    Packing loses layers where it splits a bucket of windows with different numbers of pages of each size.
    """
    num_grouped = sum(len(group.names) for groups in of_ranks for group in groups)
    _assure(num_grouped == num_layers, "KV cache groups miss layers")
    is_compact = set(layout[:2]) == {"L", "B"}
    for groups in of_ranks:
        sizes = {group.spec_of(name).page_bytes for group in groups for name in group.names}
        if len(sizes) > 1 and (not is_compact or (len(groups) > 1 and layout[0] == "L")):
            raise RefusedError(
                f"KV cache layout {layout} cannot express this model's mixed page sizes ({sorted(sizes)}); a backend "
                "should declare block-outermost supported layouts (e.g. BLHNC), or set VLLM_KV_CACHE_LAYOUT=BLHNC."
            )
        for spec in (spec for group in groups if group.names for spec in group.all_specs):
            _check_padding(spec, layout)


def _check_padding(spec: LayerSpec, layout: str) -> None:
    is_compact = set(layout[:2]) == {"L", "B"}
    if layout[0] != "B" and spec.page_bytes % spec.block_unit:
        _assure(is_compact, f"{layout} cannot pad pages")
    if spec.padded_bytes is not None and not is_compact:
        outer = layout[: max(layout.index("L"), layout.index("B")) + 1]
        held = {"H": spec.num_heads, "N": spec.num_entries, "C": spec.entry_bytes}
        _assure(
            all(held[axis] == 1 for axis in outer if axis not in "LB"),
            "Page padding requires dimensions outside the page tail to be L, B, or singleton",
        )


def _blocks_of(spec: LayerSpec, max_model_len: int, settings: PlanSettings) -> int:
    """Return the most blocks that a request of `max_model_len` tokens holds in a layer at any time."""
    in_flight, block = settings.tokens_in_flight, spec.block_size
    if spec.kind in _FULL:
        is_divided = spec.is_sharded and settings.context_parallel > 1
        return -(-(-(-max_model_len // settings.context_parallel) if is_divided else max_model_len) // block)
    if spec.kind in _WINDOWS:
        _assure(not spec.is_sharded or settings.context_parallel == 1, "DCP not support sliding window.")
        kept = (spec.window or 0) - 1 + spec.num_retained + in_flight
        return -(-min(kept, max_model_len) // block) + 1
    if spec.kind == "chunk":
        return -(-min((spec.chunk or 0) + in_flight, max_model_len) // block)
    if spec.kind == "state":
        if settings.state_mode == "align":
            return 2 + spec.num_drafts + spec.num_checkpoints
        return 1 + spec.num_drafts
    return 1 if spec.kind == "ring" else -(-settings.max_encoder_tokens // block)


def _request_blocks(groups: Sequence[_Group], max_model_len: int, settings: PlanSettings) -> int:
    return sum(max(_blocks_of(spec, max_model_len, settings) for spec in group.all_specs) for group in groups)


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the longest length of at most `most` that fits, by bisection; 0 if one token does not."""
    if not fits(1):
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f}"


def _check_memory(
    groups: Sequence[_Group], block_bytes: int, memory_bytes: int, max_model_len: int, settings: PlanSettings
) -> None:
    """Raise RefusedError if `memory_bytes` do not hold one request of the maximum length."""
    if memory_bytes <= 0:
        raise RefusedError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See "
            "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
        )
    needed = block_bytes * _request_blocks(groups, max_model_len, settings)
    if needed <= memory_bytes:
        return
    longest = _longest(
        max_model_len, lambda length: block_bytes * _request_blocks(groups, length, settings) <= memory_bytes
    )
    estimate = ""
    if longest > 0:
        estimate = f"Based on the available memory, the estimated maximum model length is {longest}. "
    raise RefusedError(
        f"To serve at least one request with the model's max seq len ({max_model_len}), ({_gib(needed)} GiB KV cache "
        f"is needed, which is larger than the available KV cache memory ({_gib(memory_bytes)} GiB). {estimate}"
        "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        "`max_model_len` when initializing the engine. See "
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
        longest,
    )


def plan(ranks: Sequence[Mapping[str, LayerSpec]], available_bytes: Sequence[int], settings: PlanSettings) -> Plan:
    """Return the plan of a model whose ranks have these layers, by name, and these bytes for KV.

    Ranks are pipeline stages; ranks of tensor parallelism have equal layers, and one stands for all. A refusal is a
    plan with `refusal`.
    """
    try:
        return _plan(ranks, available_bytes, settings)
    except RefusedError as refused:
        return Plan(refusal=refused.words, longest=refused.longest)


def _plan(ranks: Sequence[Mapping[str, LayerSpec]], available_bytes: Sequence[int], settings: PlanSettings) -> Plan:
    layout = _layout([spec for rank in ranks for spec in rank.values()], settings)
    specs = {name: spec for rank in ranks for name, spec in rank.items()}
    for name, spec in specs.items():
        if spec.kind in _WINDOWS:
            specs[name] = _changed(spec, num_retained=settings.num_retained)
    groups = _groups(specs, layout, settings.has_hybrid_manager)
    if not groups:
        return Plan(layout=layout, num_blocks=1, max_model_len=settings.max_model_len)
    is_late = settings.version == "0.32"  # it looks at memory before it looks at the layout
    of_ranks = [[group.on(rank) for group in groups] for rank in ranks]
    if not is_late:
        _check_layout(of_ranks, layout, len(specs))
    sizes = [_block_bytes(own, layout) for own in of_ranks]
    memory = list(available_bytes)
    if settings.num_blocks_override is not None:
        memory = [settings.num_blocks_override * size for size in sizes]
    usable = [own - size for own, size in zip(memory, sizes, strict=True)]
    max_model_len = settings.max_model_len
    if settings.fits_length:
        max_model_len = _fitting_length(of_ranks, sizes, usable, settings)
    for own, size, left in zip(of_ranks, sizes, usable, strict=True):
        _check_memory(own, size, left, max_model_len, settings)
    if is_late:
        _check_layout(of_ranks, layout, len(specs))
    num_blocks = min(own // size for own, size in zip(memory, sizes, strict=True))
    if settings.num_blocks_override is not None:
        num_blocks = settings.num_blocks_override
    first = [group.first for group in of_ranks[0]]
    concurrency = num_blocks / sum(_blocks_of(spec, max_model_len, settings) for spec in first)
    refusal = None
    has_states = any(spec.kind == "state" for group in of_ranks[0] for spec in group.all_specs)
    if settings.checks_states and has_states and settings.max_num_seqs > num_blocks:
        refusal = (
            f"max_num_seqs ({settings.max_num_seqs}) exceeds available Mamba cache blocks ({num_blocks}). Each decode "
            "sequence requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs "
            f"to at most {num_blocks} or increase gpu_memory_utilization."
        )
    return Plan(
        refusal=refusal,
        layout=layout,
        groups=tuple(_described(group, max_model_len, settings) for group in of_ranks[0]),
        num_blocks=num_blocks,
        block_bytes=sizes[0],
        max_model_len=max_model_len,
        kv_cache_tokens=int(concurrency * max_model_len),
        max_concurrency=concurrency,
    )


def _fitting_length(
    of_ranks: Sequence[Sequence[_Group]], sizes: Sequence[int], usable: Sequence[int], settings: PlanSettings
) -> int:
    """Return the longest length of a request that fits on all ranks. Raise RefusedError if one token does not."""
    lengths = [
        _longest(
            settings.max_model_len,
            lambda length, own=own, size=size, left=left: size * _request_blocks(own, length, settings) <= left,  # type: ignore[misc]
        )
        for own, size, left in zip(of_ranks, sizes, usable, strict=True)
    ]
    if min(lengths) <= 0:
        raise RefusedError(
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try "
            "increasing `gpu_memory_utilization`."
        )
    return min(lengths)


def _described(group: _Group, max_model_len: int, settings: PlanSettings) -> PlanGroup:
    specs = group.all_specs
    windows = {spec.window for spec in specs}
    return PlanGroup(
        kinds=tuple(Counter(spec.kind for spec in specs)),
        layers=tuple(group.names),
        block_size=group.first.block_size,
        page_bytes=sum(spec.page_bytes for spec in specs),
        blocks_per_request=_blocks_of(group.first, max_model_len, settings),
        window=next(iter(windows)) if len(windows) == 1 else None,
        chunk=group.first.chunk,
    )
