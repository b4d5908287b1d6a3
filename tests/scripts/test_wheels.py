"""Which wheels are built: pure ones, or those of a platform if the hook compiles; and what a release builds."""

from __future__ import annotations

import importlib.util
import os
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

pytest.importorskip("hatchling", reason="it builds the wheels")

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONFIG: dict[str, Any] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]


@pytest.fixture
def hook_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Built:
    """What the hook makes of a build whose compiler makes one library."""

    def __init__(self, module: ModuleType, folder: Path, *, target: str = "wheel", version: str = "standard") -> None:
        self.data: dict[str, Any] = {"force_include": {}}
        self.libraries: list[Path] = []
        module.compiled = self.compiled  # type: ignore[attr-defined]
        builder = WheelBuilder(str(ROOT))
        hook = module.CompileHook(str(ROOT), CONFIG, builder.config, builder.metadata, str(folder), target)
        self.dependencies: list[str] = hook.dependencies()
        hook.initialize(version, self.data)
        self.is_kept = [path.exists() for path in self.libraries]
        hook.finalize(version, self.data, "")

    def compiled(self, source: Path, modules: list[str], folder: Path) -> list[Path]:
        assert source == ROOT / "src"
        assert modules == CONFIG["modules"]
        path = folder / "lib" / "kvarts" / "engine.so"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
        self.libraries.append(path)
        return [path]


def test_a_compiled_wheel_is_for_its_platform(
    hook_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVARTS_COMPILE", "1")
    monkeypatch.setattr(hook_module, "what_is_missing", lambda: None)
    built = Built(hook_module, tmp_path)
    [library] = built.libraries
    assert built.data == {
        "force_include": {str(library): os.path.join("kvarts", "engine.so")},  # noqa: PTH118
        "pure_python": False,
        "infer_tag": True,
    }
    assert built.is_kept == [True]
    assert not library.exists(), "what was built is removed"
    needed = {Requirement(each).name for each in built.dependencies}
    assert needed >= {"mypy", "setuptools", *(Requirement(each).name for each in PROJECT["project"]["dependencies"])}


@pytest.mark.parametrize(
    ("asked", "target", "version"),
    [(None, "wheel", "standard"), ("0", "wheel", "standard"), ("1", "wheel", "editable"), ("1", "sdist", "standard")],
)
def test_nothing_else_is_compiled(
    asked: str | None,
    target: str,
    version: str,
    hook_module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVARTS_COMPILE", raising=False)
    if asked is not None:
        monkeypatch.setenv("KVARTS_COMPILE", asked)
    monkeypatch.setattr(hook_module, "what_is_missing", lambda: None)
    built = Built(hook_module, tmp_path, target=target, version=version)
    assert (built.libraries, built.data) == ([], {"force_include": {}})


def test_without_a_compiler_a_wheel_is_pure_unless_a_compiled_one_is_required(
    hook_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setattr(hook_module.sys, "platform", "linux")
    monkeypatch.setenv("KVARTS_COMPILE", "1")
    built = Built(hook_module, tmp_path)
    assert (built.libraries, built.dependencies) == ([], [])
    assert "there is no C compiler, so nothing is compiled" in capsys.readouterr().err
    monkeypatch.setenv("KVARTS_COMPILE", "required")
    with pytest.raises(SystemExit, match="asks for a compiled build, and there is no C compiler"):
        Built(hook_module, tmp_path)


def test_a_release_compiles_for_every_python_and_platform() -> None:
    release = PROJECT["tool"]["cibuildwheel"]
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert release["build"] == [f"cp3{minor}-*" for minor in (11, 12, 13, 14)]
    assert release["environment"] == {"KVARTS_COMPILE": "required"}
    assert release["linux"]["archs"] == ["x86_64", "aarch64"]
    assert release["macos"]["archs"] == ["x86_64", "arm64"]


@pytest.mark.long
def test_wheel_and_source_distribution_of_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is pure, and for any Python; the source distribution has the hook, and whatever a wheel is made of."""
    monkeypatch.delenv("KVARTS_COMPILE", raising=False)
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    assert wheel.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [about] = [name for name in names if name.endswith(".dist-info/WHEEL")]
        said = Parser().parsestr(archive.read(about).decode())
    assert (said["Root-Is-Purelib"], said.get_all("Tag")) == ("true", ["py3-none-any"])
    assert {f"{name.replace('.', '/')}.py" for name in CONFIG["modules"] if name != "kvarts.base.records"} < names
    [source] = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(source) as archive_of_source:
        held = {name.partition("/")[2] for name in archive_of_source.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "README.md", "LICENSE"} < held
    assert {f"src/{name}" for name in names if name.startswith("kvarts/")} <= held
