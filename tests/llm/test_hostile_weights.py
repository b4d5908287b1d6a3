"""Weights that would run code are refused, in words of ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs kvarts[torch]")
pytest.importorskip("transformers", reason="needs kvarts[torch]")
import torch

from kvarts.errors import InputError
from kvarts.executor.torch.loading import load_model
from kvarts.executor.torch.tiny import write_tiny


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
