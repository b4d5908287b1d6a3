"""What layers keep, beside what vLLM 0.32 says of the same configs, and the package that the configs are read from.

`vllm_specs.json`: for each model, rows of layers that vLLM's classes, built on the meta device for an H100 with KV in
the model's format, say they need: number of layers, kind of spec, bytes per entry or state, tokens per entry, window.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.errors import KvartsError
from kvarts.cost.hardware.geometry import Geometry
from kvarts.cost.hardware.model_config import hub_models, load_geometry

SPECS: dict[str, list[list[Any]]] = json.loads(Path(__file__).with_name("vllm_specs.json").read_text())
Row = tuple[str, Fraction, int | None]


def said_by_vllm(rows: list[list[Any]]) -> Counter[Row]:
    """Return how many layers keep how many bytes of a token, and of how many tokens."""
    counts: Counter[Row] = Counter()
    for num_layers, kind, num_bytes, every, window in rows:
        counts["state" if kind == "state" else "tokens", Fraction(num_bytes, every), window] += num_layers
    return counts


def said_by_us(geometry: Geometry) -> Counter[Row]:
    counts: Counter[Row] = Counter()
    for layer in (*geometry.layers, *geometry.caches):
        if layer.kind == "state":
            counts["state", Fraction(layer.state_bytes), None] += 1
        elif layer.keeps_tokens:
            index = Fraction(layer.fixed_bytes)  # an indexer's key is a layer of its own in vLLM
            counts["tokens", layer.read_bits(geometry.kept_as("auto")) / 8 - index, layer.span] += 1
            if index:
                counts["tokens", index, None] += 1
    return counts


@pytest.mark.parametrize("name", SPECS)
def test_layers_keep_what_vllm_says(name: str) -> None:
    assert said_by_us(load_geometry(name)) == said_by_vllm(SPECS[name])


def configs() -> Path | None:
    """Return the directory of configs of aiconfigurator_core 0.12, or the one that the environment names."""
    if "KVARTS_MODEL_CONFIGS" in os.environ:
        return Path(os.environ["KVARTS_MODEL_CONFIGS"])
    spec = find_spec("aiconfigurator_core")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model_configs"


@pytest.mark.long
@pytest.mark.skipif(configs() is None, reason="aiconfigurator_core is not installed")
def test_published_configs_are_read(tmp_path: Path) -> None:
    """All of them, and the ids of the hub stand for the same sizes."""
    directory = configs()
    assert directory is not None
    num_read = 0
    known = hub_models()
    for path in sorted(directory.glob("*--*_config.json")):
        if path.name.endswith("_hf_quant_config.json"):
            continue
        name = path.name.removesuffix("_config.json")
        published = tmp_path / name
        published.mkdir()
        (published / "config.json").write_bytes(path.read_bytes())
        beside = path.with_name(f"{name}_hf_quant_config.json")
        if beside.exists():
            (published / "hf_quant_config.json").write_bytes(beside.read_bytes())
        geometry = load_geometry(published)
        num_read += 1
        repository = name.replace("--", "/", 1)
        if repository in SPECS:
            assert said_by_us(geometry) == said_by_vllm(SPECS[repository]), name
        if "name" not in known.get(repository, {"name": ""}):
            short = load_geometry(repository)
            assert (short.weight_bytes, short.layers, short.caches, short.kv_dtype) == (
                geometry.weight_bytes,
                geometry.layers,
                geometry.caches,
                geometry.kv_dtype,
            )
    assert num_read >= 86


@pytest.mark.long
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_defaults_are_those_of_the_classes(tmp_path: Path) -> None:
    """The table is what its script makes of the pinned transformers, and a class written out reads as left out."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
    import config_defaults

    table = json.loads(config_defaults.PATH.read_text())
    if table["source"] != f"transformers {transformers.__version__}":
        pytest.skip(f"the table is of {table['source']}")
    assert config_defaults.table() == table
    num_equal = 0
    for family in table["families"]:
        whole = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
        read = []
        for values in ({"model_type": family}, {**whole, "dtype": "bfloat16"}):
            path = tmp_path / "config.json"
            path.write_text(json.dumps(values))
            try:
                geometry = load_geometry(path)
            except KvartsError:
                break  # classes whose own defaults are no model: heads that do not divide, or states only
            read.append((geometry.layers, geometry.caches, geometry.num_parameters))
        if len(read) == 2:
            assert read[0] == read[1], family
            num_equal += 1
    assert num_equal >= len(table["families"]) - 8


@pytest.mark.long
def test_the_table_of_sizes_is_what_is_read() -> None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
    import published_models

    text = published_models.DOCS.read_text()
    assert (
        text.partition(published_models.BEGIN)[2].partition(published_models.END)[0].strip() == published_models.table()
    )
