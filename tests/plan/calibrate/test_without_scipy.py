"""Without SciPy, an extra, every way into calibration states what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN = "import sys; sys.modules['scipy'] = None; from kvarts.__main__ import run; run()"
DEVICE = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
POINT = '{"num_decodes": 3, "decode_known_tokens": 30, "chunks": [], "duration_ns": 25000000}\n'


@pytest.mark.parametrize(
    "words",
    [("--design", *DEVICE), ("steps.jsonl", *DEVICE), ("--points", "points.csv")],
    ids=["design", "run", "points"],
)
def test_each_way_into_calibration_names_the_extra(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "steps.jsonl").write_text(POINT * 40)
    (tmp_path / "points.csv").write_text("source,gpu\na,b\n")
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, "calibrate", *words], cwd=tmp_path, capture_output=True, check=False, text=True
    )
    assert "calibration needs SciPy. Install it: pip install 'kvarts[calibrate]'." in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
