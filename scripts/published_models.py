"""Models by the ids of their repositories: what `kvarts model show Qwen/Qwen3-235B-A22B-FP8` reads.

`python scripts/published_models.py CONFIGS` reads a directory with files `ORGANISATION--NAME_config.json`, as the wheel
aiconfigurator_core 0.12.0 has in `model_configs`, each with its hf_quant_config.json beside it, and writes their fields
that kvarts reads to src/kvarts/cost/hardware/presets/hub.json. Lists of modules are shortened to wildcards where that
gives the same sizes. `python scripts/published_models.py --table` writes the table of sizes in docs/models.md, and
without arguments the script exits with 1 if that table is another.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.kv.layers import KvLayer
from kvarts.cost.hardware import model_config
from kvarts.cost.hardware.config_layers import ConfigFields
from kvarts.cost.hardware.device import Device, load_device
from kvarts.cost.hardware.fit import check_split, fit_memory
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.vllm.start import StartSettings, start

PATH = Path(__file__).parents[1] / "src/kvarts/cost/hardware/presets/hub.json"
DOCS = Path(__file__).parents[1] / "docs/models.md"
BEGIN, END = "<!-- sizes -->", "<!-- end of sizes -->"
DEVICE, SPLITS, LENGTH = "h200-141gb", (1, 2, 4, 8), 32_768
FIELDS = {*ConfigFields.__struct_encode_fields__, "num_experts_per_token", "num_shared_experts", "num_attention_groups"}
NEEDED = (
    "quant_method",
    "quant_algo",
    "weight_block_size",
    "bits",
    "group_size",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "config_groups",
    "ignore",
    "modules_to_not_convert",
    "quantized_layers",
)
SCHEME = ("num_bits", "type", "group_size", "strategy")


def sizes(geometry: Geometry) -> list[Any]:
    """Return what has to stay as it is."""
    told = msgspec.to_builtins(msgspec.structs.replace(geometry, name="", source=""))
    return [geometry.weight_bytes, geometry.expert_bytes, {**told, "stored": sorted(told["stored"])}]


def shortened(names: list[str], agrees: Callable[[list[str]], bool]) -> list[str]:
    """Return names with layers as wildcards where `agrees` says that it makes no difference, and none without use."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"layers\.\d+", "layers.*", name), []).append(name)
    for general, members in list(groups.items()):
        for choice in ([], [general]):
            if agrees([name for other, kept in groups.items() for name in (choice if other == general else kept)]):
                groups[general] = choice
                break
        else:
            groups[general] = members
    return [name for kept in groups.values() for name in kept]


def compact(values: dict[str, Any], read: Callable[[dict[str, Any]], Geometry]) -> dict[str, Any]:
    """Return a quantization config with what decides sizes."""
    inner = values.get("quantization")
    values = {**values, **inner} if isinstance(inner, dict) else values
    values = {**values, "ignore": values.get("ignore") or values.get("exclude_modules")}
    if values.get("quant_method") is None and "quant_algo" in values:
        values["quant_method"] = "modelopt"
    kept = {key: values[key] for key in NEEDED if values.get(key)}
    for group in kept.get("config_groups", {}).values():
        group["weights"] = {
            key: value for key, value in group["weights"].items() if key in SCHEME and value is not None
        }
        for key in set(group) - {"weights", "targets"}:
            del group[key]
    if kept.get("quant_method", "").startswith("modelopt") or kept.get("quant_method") == "fp8":
        kept.pop("config_groups", None)
    whole = sizes(read(kept))
    for key in ("ignore", "modules_to_not_convert"):
        if key in kept:
            kept[key] = shortened(kept[key], lambda names, key=key: sizes(read({**kept, key: names})) == whole)  # type: ignore[misc]
            if not kept[key]:
                del kept[key]
    if "quantized_layers" in kept:
        by_format: dict[str, list[str]] = {}
        for name, own in kept["quantized_layers"].items():
            by_format.setdefault(own["quant_algo"], []).append(re.sub(r"experts\.\d+\.", "experts.0.", name))
        said = {name: {"quant_algo": algo} for algo, names in by_format.items() for name in sorted(set(names))}
        for algo, names in by_format.items():
            others = {name: own for name, own in said.items() if own["quant_algo"] != algo}

            def agrees(names: list[str], algo: str = algo, others: dict[str, Any] = others) -> bool:
                layers = {**others, **{name: {"quant_algo": algo} for name in names}}
                return sizes(read({**kept, "quantized_layers": layers})) == whole

            said = {**others, **{name: {"quant_algo": algo} for name in shortened(sorted(set(names)), agrees)}}
        kept["quantized_layers"] = said
    return kept


def write_configs(configs: Path) -> int:
    """Write the file of configs."""
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(configs.glob("*--*_config.json")):
            if path.name.endswith("_hf_quant_config.json"):
                continue
            repository = path.name.removesuffix("_config.json").replace("--", "/", 1)
            values = model_config._read_json(path)
            text = next((values[key] for key in model_config._NESTED if isinstance(values.get(key), dict)), values)
            outer = {key: values[key] for key in ("torch_dtype", "dtype", "tie_word_embeddings") if key in values}
            kept = {key: value for key, value in {**outer, **text}.items() if key in FIELDS}
            kept["model_type"] = model_config._values_of_text(values, path).get("model_type")
            kept["model_type"] = text.get("model_type") or kept["model_type"]
            quantization = values.get("quantization_config") or text.get("quantization_config")
            beside = path.with_name(path.name.replace("_config.json", "_hf_quant_config.json"))
            if quantization is None and beside.exists():
                quantization = model_config._read_json(beside)
            kept.pop("quantization_config", None)
            for key in ("rope_scaling", "rope_parameters"):  # forms that do not change the length
                kept.pop(key, None)
            made = Path(folder) / "config.json"

            def read(own: dict[str, Any] | None, kept: dict[str, Any] = kept, made: Path = made) -> Geometry:
                made.write_bytes(msgspec.json.encode({**kept, "quantization_config": own}))
                return model_config.load_geometry(made)

            if quantization is not None:
                kept["quantization_config"] = compact(quantization, read)
            whole = sizes(model_config.load_geometry(path))
            for block in kept.get("block_configs", ()):
                block["attention"] = {key: block["attention"][key] for key in ("n_heads_in_group", "no_op")}
                block["ffn"] = {key: block["ffn"][key] for key in ("ffn_mult", "no_op")}
            for key in [key for key, value in kept.items() if isinstance(value, list) and len(value) > 8]:
                rest = {other: value for other, value in kept.items() if other != key}
                if key != "layers_block_type" and sizes(read(rest.get("quantization_config"), rest)) == whole:
                    kept = rest  # the list is what the family has without it
            if sizes(read(kept.get("quantization_config"), kept)) != whole:
                print(f"{repository} is another when it is shortened", file=sys.stderr)
                return 1
            models[repository] = {key: kept[key] for key in sorted(kept)}
            print(repository, len(msgspec.json.encode(models[repository])))
    lines = [
        f"{msgspec.json.encode(name).decode()}:{msgspec.json.encode(own).decode()}" for name, own in models.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


def table() -> str:
    """Return the rows of all models that are known by the ids of the hub."""
    device = load_device(DEVICE)
    lines = [
        "| model | weights | KV a token | in fp8 | states | groups | block | "
        + " | ".join(f"{n}x" for n in SPLITS)
        + " |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|" + "---:|" * len(SPLITS))
    for name in sorted(model_config.hub_models(), key=str.lower):
        geometry = model_config.load_geometry(name)
        planned = start(geometry.on(device), device, StartSettings(max_model_len=LENGTH)).plan(1 << 40)
        blocks = sorted({group.block_size for group in planned.groups})
        cells = [
            f"[{name}]({geometry.source.partition(', ')[0]})",
            f"{geometry.weight_bytes / 1e9:,.1f} GB",
            f"{geometry.kv_bytes_per_token('auto'):,}",
            f"{geometry.kv_bytes_per_token('fp8'):,}",
            f"{geometry.state_bytes / 1e6:,.1f} MB" if geometry.state_bytes else "",
            str(len(planned.groups)),
            ", ".join(map(str, blocks)),
            *(_fitting(geometry, device, split) for split in SPLITS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _fitting(geometry: Geometry, device: Device, split: int) -> str:
    """Return the tokens that vLLM plans on `split` devices for sequences of at most LENGTH tokens."""
    try:
        check_split(geometry, tensor_parallel=split)
        memory = fit_memory(
            msgspec.structs.replace(geometry, state=None, layers=_without_states(geometry)),
            device,
            EngineConfig(max_num_batched_tokens=8192, max_num_seqs=1024),
            memory_fraction=0.92,
            tensor_parallel=split,
        )
    except ConfigError:
        return ""
    own = geometry.on(device)
    plan = start(
        own,
        device,
        StartSettings(tensor_parallel=split, max_model_len=LENGTH, max_num_seqs=1, max_num_batched_tokens=8192),
    )
    tokens = plan.plan(memory.kv_bytes).kv_cache_tokens
    return f"{tokens / 1e6:,.2f} M" if tokens else ""


def _without_states(geometry: Geometry) -> tuple[KvLayer, ...]:
    """Return the layers, those with a state as layers that keep nothing: vLLM keeps states in the pool."""
    return tuple(KvLayer(kind="none") if layer.kind == "state" else layer for layer in geometry.layers)


def main() -> int:
    """Write the configs or the table, or compare the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path, nargs="?")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.configs is not None:
        return write_configs(options.configs)
    text = DOCS.read_text()
    before, rest = text.split(BEGIN, 1)
    made = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"
    if options.table:
        DOCS.write_text(made)
    elif made != text:
        print(f"{DOCS}: the table of sizes is another: write it again with --table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
