"""Weights that would run code are refused, in words of ours."""

from __future__ import annotations

import json
import os
import random
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs kvarts[torch]")
pytest.importorskip("transformers", reason="needs kvarts[torch]")
import torch

from kvarts.base.errors import InputError, KvartsError
from kvarts.run.torch.gguf_file import GgufFile
from kvarts.run.torch.gguf_model import read_model
from kvarts.run.torch.loading import load_model, load_tokenizer
from kvarts.run.torch.tiny import write_tiny

from builders.gguf_files import small_model, write_gguf


class Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    model, ran = tmp_path / "model", tmp_path / "ran"
    write_tiny("llama", model)
    (model / "model.safetensors").unlink()
    torch.save({"weight": Runs(f"touch {ran}")}, model / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"a pickle that holds more than tensors.*Convert them to safetensors") as said:
        load_model(model)
    assert "weights_only" not in str(said.value)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "4"),
        ("num_hidden_layers", 10**9),
        ("head_dim", 64.5),
        ("hidden_size", 10**12),
        ("vocab_size", -5),
    ],
)
def test_sizes_that_cannot_be_are_named_before_anything_is_built(tmp_path: Path, field: str, value: object) -> None:
    model = tmp_path / "model"
    write_tiny("llama", model)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(InputError) as said:
        load_model(model)
    assert str(said.value).startswith(f"{path}: {field}: Expected")
    assert said.value.exit_code == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_attention_heads", 10**6), ("head_dim", 10**9), ("vocab_size", 10**9), ("hidden_size", 2**31 - 1)],
)
def test_sizes_that_the_weights_cannot_have_are_named_before_anything_is_built(
    tmp_path: Path, field: str, value: int
) -> None:
    model = tmp_path / "model"
    write_tiny("llama", model)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    named = r"config\.json: \w+: the weights have less than a matrix of|is no model that transformers knows"
    with pytest.raises(InputError, match=named) as said:
        load_model(model)
    assert said.value.exit_code == 4


def test_fields_of_a_type_that_transformers_refuses_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny("llama", model)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": [1]}))
    with pytest.raises(InputError, match="is no model that transformers knows"):
        load_model(model)


def test_a_tokenizer_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny("llama", model)
    (model / "tokenizer.json").write_text('{"model":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(InputError, match=r"tokenizer\.json: is nested too deeply"):
        load_tokenizer(model)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_mutated_weights_are_a_model_or_an_error_of_ours(seed: int, tmp_path: Path) -> None:
    """Bytes changed, cut, doubled and inserted, most of them in headers: bounded in memory, and no other exception."""
    rng = random.Random(seed)
    write_tiny("llama", tmp_path / "model")
    gguf = tmp_path / "model.gguf"
    write_gguf(small_model("qwen2"), "qwen2", gguf)
    safetensors = tmp_path / "model" / "model.safetensors"
    outcomes: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    readers: dict[Path, Callable[[], object]] = {
        safetensors: lambda: load_model(safetensors.parent),
        gguf: lambda: read_model(GgufFile(gguf), None),
    }
    for path, read in readers.items():
        whole = path.read_bytes()
        for _ in range(100):
            path.write_bytes(mutated(whole, rng))
            try:
                read()
                outcomes[f"{path.suffix} read"] += 1
            except KvartsError:
                outcomes[f"{path.suffix} refused"] += 1
        path.write_bytes(whole)
    assert min(outcomes[".safetensors refused"], outcomes[".gguf refused"]) > 20, outcomes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024, "KiB"


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """Return `whole` with one to four changes; three of four are in its first 4 KiB."""
    changed = bytearray(whole)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(min(len(changed), 4096 if rng.random() < 0.75 else len(changed)) or 1)
        match rng.randrange(5):
            case 0:
                changed[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[place : place + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, (1 << 40).to_bytes(8, "little")])
            case 2:
                del changed[place : place + rng.choice([1, 8, 4096, len(changed)])]
            case 3:
                changed[place:place] = rng.randbytes(rng.randrange(1, 40))
            case _:
                changed[place:place] = changed[place : place + rng.randrange(1, 400)]
    return bytes(changed)
