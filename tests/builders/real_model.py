"""The small model with real weights that `kvarts model get` downloads, for tests that need one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarts.base.errors import MissingFileError
from kvarts.run.model_files import located_model

__all__ = ["real_model"]


def real_model() -> Path:
    """The GGUF file of the model; where it was not downloaded, the test is skipped."""
    try:
        (path,) = located_model("smollm2").glob("*.gguf")
    except MissingFileError:
        pytest.skip("real weights need `kvarts model get smollm2` (93 MB)", allow_module_level=True)
    return path
