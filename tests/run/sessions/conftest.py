"""Small models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """A family's model with pages, and the same with transformers' own attention."""
    pytest.importorskip("torch", reason="real models need kvarts[torch]")
    pytest.importorskip("transformers", reason="real models need kvarts[torch]")
    from transformers import AutoModelForCausalLM

    from kvarts.run.torch.loading import load_model
    from kvarts.run.torch.tiny import write_tiny

    root = tmp_path_factory.mktemp("session_models")
    loaded: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in loaded:
            path: Path = root / family
            write_tiny(family, path)
            reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
            loaded[family] = load_model(path), reference
        return loaded[family]

    return pair
