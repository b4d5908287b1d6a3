"""Small models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a small model of a family."""
    from kvarts.run.torch.tiny import write_tiny

    root = tmp_path_factory.mktemp("models")

    def directory(family: str) -> Path:
        path = root / family
        if not path.exists():
            write_tiny(family, path)
        return path

    return directory


@pytest.fixture(scope="session")
def models(tiny: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """A family's model with pages, and the same with transformers' own attention and cache."""
    from transformers import AutoModelForCausalLM

    from kvarts.run.torch.loading import load_model

    loaded: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in loaded:
            path = tiny(family)
            reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
            loaded[family] = load_model(path), reference
        return loaded[family]

    return pair


@pytest.fixture(scope="session")
def windowed() -> Callable[[str], tuple[Any, Any]]:
    """A small model of a family with small windows, with pages, and the same with transformers' attention and cache."""
    from builders.windowed_models import config_of, models_of

    made: dict[str, tuple[Any, Any]] = {}

    def pair(family: str) -> tuple[Any, Any]:
        if family not in made:
            made[family] = models_of(config_of(family))
        return made[family]

    return pair
