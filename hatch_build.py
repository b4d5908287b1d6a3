"""Builds the wheel: as Python, or with the modules that pyproject.toml lists compiled by mypyc beside the Python.

`KVARTS_COMPILE=1` compiles; where there is no C compiler it says so and goes on, and `KVARTS_COMPILE=required` fails.
Without it, and for an editable installation, everything stays Python.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
import sysconfig
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILER = ["mypy==2.4.*", "setuptools>=80"]
EXACT = ["-ffp-contract=off"]
"""A multiplication and an addition are rounded one by one, as Python does it: reports are the same to the last byte."""
CLOSED = ["-fvisibility=hidden"]
"""Nothing else calls the functions of the library, so its own calls are direct and may be inlined.

GCC and Clang, which compile wherever setuptools does not use MSVC, both know it. Only the function that Python calls to
import a library stays visible: its declaration in Python's headers says so.
"""


class CompileHook(BuildHookInterface[Any]):
    """Compiles `modules` of its configuration into the wheel."""

    def dependencies(self) -> list[str]:
        """Return what compiling needs: the compiler, and what the modules import, for their types."""
        return [*COMPILER, *self.metadata.core.dependencies] if self._is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the results to the wheel."""
        if version == "editable" or not self._is_wanted():
            return
        self._folder = Path(tempfile.mkdtemp(prefix="kvarts-build-"))
        for path in compiled(Path(self.root) / "src", self.config["modules"], self._folder):
            build_data["force_include"][str(path)] = str(path.relative_to(self._folder / "lib"))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder)

    def _is_wanted(self) -> bool:
        asked = os.environ.get("KVARTS_COMPILE", "0")
        if self.target_name != "wheel" or asked in ("", "0"):
            return False
        missing = what_is_missing()
        if missing is None:
            return True
        if asked == "required":
            sys.exit(f"KVARTS_COMPILE asks for a compiled build, and there is no {missing}")
        print(f"kvarts: there is no {missing}, so nothing is compiled", file=sys.stderr)
        return False


def what_is_missing() -> str | None:
    """Return what compiling would need and is not there: a C compiler, as Python was built with or CC says, or headers.

    None if it can be tried.
    """
    if sys.platform == "win32":
        return None  # found by setuptools, or not
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(command.split()[0]) is None:
        return "C compiler"
    return None if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python.h"


def docstrings(text: str) -> list[str]:
    """Return statements that give classes of a module their docstrings, which mypyc drops."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and ast.get_docstring(node)]
    return [f'setattr({each.name}, "__doc__", {ast.get_docstring(each, clean=False)!r})\n' for each in classes]


def compiled(source: Path, modules: list[str], folder: Path) -> list[Path]:
    """Compile `modules`, which lie in `source`; return the libraries, under `lib` in `folder`."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    paths = [module.replace(".", "/") + ".py" for module in modules]
    copy = folder / "src"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for path in paths:
        with (copy / path).open("a", encoding="utf-8") as file:
            file.writelines(docstrings((copy / path).read_text(encoding="utf-8")))
    # From there, a traceback names files as they lie beside the libraries once these are installed.
    with chdir(copy):
        extensions = mypycify(
            [
                "--follow-imports=silent",
                "--config-file",
                str(source.parent / "pyproject.toml"),
                "--cache-dir",
                str(folder / "cache"),
                *paths,
            ],
            group_name="kvarts",
            debug_level="0",
            target_dir=str(folder / "c"),
        )
        for extension in extensions:
            if sys.platform != "win32":
                extension.extra_compile_args += EXACT + CLOSED
        command = build_ext(Distribution({"name": "kvarts", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "temp")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
    return [Path(path) for path in command.get_outputs()]
