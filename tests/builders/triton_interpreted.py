"""Triton's kernels on a CPU, by its interpreter: slow, and the same numbers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from kvarts.run.torch import triton_backend

REASON = "PyTorch for a CPU comes without Triton"
TRITON = pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason=REASON))
"""The name of the backend, as a parameter of tests."""


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few programs share what Triton, see conftest, interprets."""
    monkeypatch.setattr(triton_backend, "PROGRAMS_AT_ONCE", 8)


def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The maker of the backend; the test is skipped without Triton."""
    pytest.importorskip("triton", reason=REASON)
    interpret(monkeypatch)
    return triton_backend.TritonBackend
