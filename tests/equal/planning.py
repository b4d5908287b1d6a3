"""Law L16, planning of KV memory: kvarts' restatement next to vLLM's own functions, on random specs and settings.

    PYTHONPATH=src:tests VLLM_VENV/bin/python -m equal.planning --jobs 20000

Runs with vLLM 0.32 as installed, or with 0.33 where its Python files precede it in PYTHONPATH: planning needs no
platform. Compared: layout, groups with their layers, blocks, bytes of a block, tokens, concurrency, the fitted length,
blocks per request, and refusals with the length that they name.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec

from kvarts.cost.vllm.planning import LAYOUTS, LayerSpec, PlanSettings, plan

GIB = 1 << 30
ATTENTION = ("full", "mla", "window", "window_mla", "chunk", "ring", "cross")
DTYPES = {"bfloat16": 2, "uint8": 1, "float32": 4}


class Job(msgspec.Struct, frozen=True):
    """Layers of each rank by name, bytes for KV, and settings."""

    ranks: list[dict[str, LayerSpec]]
    available: list[int]
    settings: PlanSettings


def draw_layer(rng: random.Random, kind: str) -> LayerSpec:
    """Return a random layer; `cell` holds the size of heads, of values, and the number format."""
    block = rng.choice((16, 16, 16, 32, 64, 128, 256))
    if kind == "state":
        return LayerSpec(
            kind="state",
            block_size=block,
            state_bytes=rng.choice((65_536, 98_304, 131_072, 66_000)),
            padded_bytes=rng.choice((None, None, 131_072, 262_144)),
            num_drafts=rng.choice((0, 0, 1, 3)),
            num_checkpoints=rng.choice((0, 0, 1)),
            is_sharded=False,
        )
    dtype = rng.choice(("bfloat16", "bfloat16", "uint8", "float32"))
    is_latent = kind in ("mla", "window_mla")
    head = rng.choice((128, 132, 512, 576, 656)) if is_latent else rng.choice((64, 128, 192, 256))
    value = 0 if is_latent else rng.choice((head, head, head, 128))
    heads = 1 if is_latent else rng.choice((1, 2, 4, 8))
    every = rng.choice((1, 1, 4, 128)) if is_latent and block >= 128 else 1
    entry = (head + value) * DTYPES[dtype]
    form, alignment = "", None
    if is_latent:
        form = rng.choice(("auto|", "fp8_ds_mla|deepseek_v4"))
        alignment = rng.choice((None, None, 576, 512)) if "v4" in form else None
    padded = None
    if alignment is None and rng.random() < 0.1:
        padded = heads * (block // every) * entry + rng.choice((0, 256, 65_536))
    return LayerSpec(
        kind=kind,  # type: ignore[arg-type]
        block_size=block,
        num_heads=heads,
        entry_bytes=entry,
        tokens_per_entry=every,
        padded_bytes=padded,
        alignment=alignment,
        window=rng.choice((128, 128, 1024)) if kind.startswith("window") else None,
        chunk=rng.choice((1024, 8192)) if kind == "chunk" else None,
        cell=f"{head} {value} {dtype}",
        form=form,
        stride_unit=rng.choice((512, 576, 4096)) if rng.random() < 0.06 else None,
        kernel_block=rng.choice((16, 64)) if rng.random() < 0.04 and every == 1 else None,
        is_sharded=rng.random() < 0.93,
    )


def draw_job(seed: int, version: str) -> Job:
    """Return random layers in patterns as models have them, of one to three stages, and random settings."""
    rng = random.Random(seed)
    kinds: list[LayerSpec] = []
    for _ in range(rng.choice((1, 2, 2, 2, 3, 4))):
        kind = rng.choice(("full", "full", "window", "state", "mla", "window_mla", "chunk", "ring", "cross"))
        kinds.append(draw_layer(rng, kind))
        if kind != "state" and rng.random() < 0.4:  # the same cells with another span, or block, or format
            own = kinds[-1]
            if own.kind == "full":
                made = msgspec.structs.replace(own, kind="window", window=rng.choice((128, 1024)))
                kinds.append(rng.choice((made, msgspec.structs.replace(own, window=512))))
            elif own.kind == "mla":
                kinds.append(msgspec.structs.replace(own, block_size=64, padded_bytes=None))
            elif own.kind == "window":
                kinds.append(msgspec.structs.replace(own, kind="full", window=None))
    if rng.random() < 0.6:
        kinds = [msgspec.structs.replace(one, block_size=kinds[0].block_size, padded_bytes=None) for one in kinds]
    if any(one.tokens_per_entry > one.block_size for one in kinds):
        kinds = [msgspec.structs.replace(one, tokens_per_entry=1, padded_bytes=None) for one in kinds]
    kinds = [msgspec.structs.replace(one, stride_unit=None) if one.kernel_block is not None else one for one in kinds]
    layers: list[LayerSpec] = []
    if rng.random() < 0.5:
        pattern = [one for one in kinds for _ in range(rng.choice((1, 1, 2, 5)))]
        layers = (pattern * rng.randint(1, 12))[: rng.randint(1, 48)]
    else:
        layers = [one for one in kinds for _ in range(rng.randint(1, 20))]
    if rng.random() < 0.2:
        rng.shuffle(layers)
    num_ranks = rng.choice((1, 1, 1, 2, 3)) if len(layers) >= 6 else 1
    share = -(-len(layers) // num_ranks)
    names = [f"layers.{index}" for index in range(len(layers))]
    pairs = list(zip(names, layers, strict=True))
    ranks = [dict(pairs[start : start + share]) for start in range(0, len(layers), share)]
    orders = rng.choice((LAYOUTS, LAYOUTS, ("LBHNC", "BLHNC"), ("BLHNC",), ("BHLNC", "LHBNC"), ("LBNHC",)))
    settings = PlanSettings(
        max_model_len=rng.choice((1, 100, 8192, 40_960, 131_072, 1_048_576)),
        tokens_in_flight=rng.choice((2048, 8192, 16_384, 32_768)),
        max_num_seqs=rng.choice((16, 256, 1024)),
        version=version,  # type: ignore[arg-type]
        layouts=orders,
        layout=rng.choice((None, None, None, None, "BLHNC", "NHD", "BHLNC")),
        has_hybrid_manager=rng.random() < 0.8,
        state_mode=rng.choice(("align", "align", "none")),
        context_parallel=rng.choice((1, 1, 1, 1, 2, 4)),
        num_retained=rng.choice((0, 0, 0, 2)),
        max_encoder_tokens=rng.choice((1500, 3000)),
        num_blocks_override=rng.choice((None, None, None, None, 100, 5000)),
        fits_length=rng.random() < 0.2,
        checks_states=rng.random() < 0.8,
    )
    scale = rng.choice((0, 1, 1, 4, 4, 40, 40, 400))
    available = [scale * GIB // 10 + rng.randint(-5, 10_000_000) for _ in ranks]
    return Job(ranks, available, settings)


class Vllm:
    """Plans by vLLM's functions."""

    def __init__(self) -> None:
        import logging

        import torch
        import vllm.v1.core.kv_cache_utils as utils
        import vllm.v1.kv_cache_interface as interface
        from vllm.config import CacheConfig
        from vllm.v1.attention.backend import MultipleOf
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

        logging.disable(logging.WARNING)
        register_all_kvcache_specs(None)
        self.torch, self.utils, self.interface, self.multiple = torch, utils, interface, MultipleOf
        self.cache_config, self.layout_of = CacheConfig, resolve_kv_cache_layout
        try:
            import vllm.v1.core.kv_cache_planning as planning
        except ImportError:
            self.planning, self.version = utils, "0.32"
        else:
            self.planning, self.version = planning, "0.33"

    def spec(self, layer: LayerSpec) -> Any:
        """Return vLLM's spec of a layer."""
        own = self.interface
        common: dict[str, Any] = {"block_size": layer.block_size}
        if layer.kind == "state":
            return own.MambaSpec(
                **common,
                shapes=((layer.state_bytes,),),
                dtypes=(self.torch.uint8,),
                page_size_padded=layer.padded_bytes,
                num_speculative_blocks=layer.num_drafts,
                num_prefill_checkpoint_blocks=layer.num_checkpoints,
            )
        head, value, dtype = layer.cell.split()
        common |= {
            "num_kv_heads": layer.num_heads,
            "head_size": int(head),
            "dtype": getattr(self.torch, dtype),
            "page_size_padded": layer.padded_bytes if layer.alignment is None else None,
            "dcp_sharded": layer.is_sharded,
            "tokens_per_state": layer.tokens_per_entry,
            "block_stride_alignment": layer.stride_unit
            if layer.kernel_block is None
            else self.multiple(layer.kernel_block),
        }
        if layer.kind in ("mla", "window_mla"):
            name, _, model = layer.form.partition("|")
            common |= {"cache_dtype_str": name, "model_version": model or None, "alignment": layer.alignment}
        else:
            common |= {"head_size_v": int(value)}
        spans: dict[str, Any] = {
            "full": {"sliding_window": layer.window, "attention_chunk_size": layer.chunk},
            "window": {"sliding_window": layer.window},
            "window_mla": {"sliding_window": layer.window},
            "chunk": {"attention_chunk_size": layer.chunk},
        }
        kinds = {
            "full": own.FullAttentionSpec,
            "mla": own.MLAAttentionSpec,
            "window": own.SlidingWindowSpec,
            "window_mla": own.SlidingWindowMLASpec,
            "chunk": own.ChunkedLocalAttentionSpec,
            "ring": own.CircularBufferSpec,
            "cross": own.CrossAttentionSpec,
        }
        return kinds[layer.kind](**common, **spans.get(layer.kind, {}))

    def config(self, settings: PlanSettings) -> Any:
        """Return what planning reads of a VllmConfig."""
        cache = self.cache_config(block_size=16)
        cache.mamba_cache_mode = settings.state_mode
        cache.num_gpu_blocks_override = settings.num_blocks_override
        length = -1 if settings.fits_length else None
        retained = settings.num_retained
        return SimpleNamespace(
            cache_config=cache,
            model_config=SimpleNamespace(
                max_model_len=settings.max_model_len,
                original_max_model_len=length,
                supports_kv_cache_grouping=False,
                hf_config=SimpleNamespace(model_type=""),
            ),
            scheduler_config=SimpleNamespace(
                disable_hybrid_kv_cache_manager=not settings.has_hybrid_manager,
                max_num_seqs=settings.max_num_seqs,
                max_num_encoder_input_tokens=settings.max_encoder_tokens,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=settings.context_parallel, tensor_parallel_size=1
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            device_config=SimpleNamespace(device_type="cuda"),
            speculative_config=None,
            kv_transfer_config=None,
            max_in_flight_tokens=settings.tokens_in_flight,
            num_prefill_lookahead_tokens=retained + 1 if retained else 0,
        )

    def plan(self, job: Job) -> dict[str, Any]:
        """Return vLLM's plan, in our words."""
        os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
        if job.settings.layout is not None:
            os.environ["VLLM_KV_CACHE_LAYOUT"] = job.settings.layout
        try:
            return self._plan(job)
        except Exception as error:
            return {"refused": kind_of(error, str(error))}

    def _plan(self, job: Job) -> dict[str, Any]:
        config, settings = self.config(job.settings), job.settings
        specs = [{name: self.spec(layer) for name, layer in rank.items()} for rank in job.ranks]
        every = [spec for rank in specs for spec in rank.values()]
        layout = self.layout_of(config, [list(settings.layouts)] * len(specs), every)
        more = () if self.planning is self.utils else (self.planning.get_global_kv_cache_groups(config, specs),)
        configs = self.planning.get_kv_cache_configs(config, specs, list(job.available), *more)
        whole = self.utils.generate_scheduler_kv_cache_config(configs)
        tokens, concurrency = self.utils.get_kv_cache_capacity(config, whole)
        is_refused = settings.checks_states and whole.has_mamba_layers and settings.max_num_seqs > whole.num_blocks
        return {
            "layout": layout.name,
            "groups": [
                (tuple(group.layer_names), group.kv_cache_spec.block_size) for group in configs[0].kv_cache_groups
            ],
            "blocks": whole.num_blocks,
            "block_bytes": configs[0].kv_cache_tensors[0].size // whole.num_blocks
            if configs[0].kv_cache_tensors
            else None,
            "length": config.model_config.max_model_len,
            "tokens": tokens,
            "concurrency": concurrency,
            "requests": [
                -(-group.kv_cache_spec.max_memory_usage_bytes(config) // group.kv_cache_spec.page_size_bytes)
                for group in whole.kv_cache_groups
            ],
            "too many": is_refused,
        }


def kind_of(error: Exception | None, text: str) -> str:
    """Return what a refusal says: the reason, and the length that it names."""
    if isinstance(error, AssertionError | StopIteration) or text.startswith("AssertionError"):
        return "assertion"
    for words in (
        "No available memory",
        "To serve at least one",
        "Cannot auto-fit",
        "same window size",
        "Failed to promote",
        "cannot express",
        "block-compact",
        "block-outer",
        "does not satisfy every",
        "page size is not divisible",
        "bounded_replay",
    ):
        if words in text:
            length = text.partition("model length is ")[2].partition(".")[0]
            return f"{words} {length}"
    return f"{type(error).__name__}: {text}"


def ours(job: Job) -> dict[str, Any]:
    """Return kvarts' plan."""
    own = plan(job.ranks, job.available, job.settings)
    if own.refusal is not None and own.num_blocks is None:
        return {"refused": kind_of(None, own.refusal)}
    return {
        "layout": own.layout,
        "groups": [(group.layers, group.block_size) for group in own.groups],
        "blocks": own.num_blocks,
        "block_bytes": own.block_bytes if any(group.layers for group in own.groups) else None,
        "length": own.max_model_len,
        "tokens": own.kv_cache_tokens,
        "concurrency": own.max_concurrency,
        "requests": [group.blocks_per_request for group in own.groups],
        "too many": own.refusal is not None,
    }


def main() -> int:
    """Compare, print what differs and one line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("KVARTS_EQUAL", "2000")))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vllm = Vllm()
    began, num_differing = time.monotonic(), 0
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.jobs):
        job = draw_job(seed, vllm.version)
        own, theirs = ours(job), vllm.plan(job)
        if "refused" in theirs:
            counts[f"refused: {theirs['refused'].rstrip(' 0123456789')}"] += 1
        else:
            counts["planned"] += 1
            counts["of several groups"] += len(theirs["groups"]) > 1
        if own != theirs:
            num_differing += 1
            if num_differing <= 3:
                print(f"seed {seed}:\n{msgspec.json.encode(job).decode()}\nvLLM   {theirs}\nkvarts {own}", flush=True)
    print(
        f"vLLM {vllm.version}: {options.jobs:,} plans from seed {options.seed}, {num_differing} differ; "
        f"{', '.join(f'{count:,} {name}' for name, count in counts.most_common())}; {time.monotonic() - began:.0f} s"
    )
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
