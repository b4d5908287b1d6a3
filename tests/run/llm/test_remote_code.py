"""Code that comes with a model runs if that is asked for, and not otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvarts.base.errors import InputError
from kvarts.run.torch.llm import LLM

OWN = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def with_code(tmp_path: Path) -> tuple[Path, Path]:
    """A model's directory with code, and a file that the code makes when it runs."""
    directory, marker = tmp_path / "model", tmp_path / "it-ran"
    directory.mkdir()
    (directory / "own.py").write_text(OWN.format(marker=str(marker)))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoTokenizer": ["own.Own", None]}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory, marker


def test_code_of_a_model_does_not_run_unless_it_is_trusted(with_code: tuple[Path, Path]) -> None:
    directory, marker = with_code
    with pytest.raises(InputError, match="--set trust_remote_code=true"):
        LLM(str(directory), kv_memory="1MiB")
    assert not marker.exists()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_no_answer_on_standard_input_makes_it_run(with_code: tuple[Path, Path], command: str) -> None:
    directory, marker = with_code
    more = ["--prompt", "a"] if command == "generate" else []
    done = subprocess.run(
        [sys.executable, "-m", "kvarts", command, "--model", str(directory), *more],
        input="y\ny\ny\n", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and not marker.exists()
    assert "Traceback" not in done.stderr


def test_an_option_that_names_the_risk_runs_it(with_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, marker = with_code
    monkeypatch.setenv("HF_MODULES_CACHE", str(directory.parent / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory.parent / "modules"))
    monkeypatch.syspath_prepend(str(directory.parent / "modules"))
    with pytest.raises(Exception):  # noqa: B017, PT011  # it has no weights
        LLM(str(directory), kv_memory="1MiB", trust_remote_code=True)
    assert marker.exists()
