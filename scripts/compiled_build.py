"""Show that the compiled build is kvarts as well: build it, run the laws on it, and compare its bytes.

    python scripts/compiled_build.py [--keep DIR | --built DIR] [--no-tests] [--no-bytes] [TEST ...]

The wheel is built from this checkout with KVARTS_COMPILE=1, and unpacked to a temporary folder, which then stands in
for the sources. Tests (TESTS unless given) import kvarts from there: it is checked that every module on the list in
pyproject.toml is a library. Then `same_bytes.py` compares reports, requests, timelines and journals with those of the
sources. Prints what the wheels of both builds took and how large they are. Exits with 1 if anything fails, and with 0
and a message if there is no C compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/core/kv",
    "tests/core/sched",
    "tests/sim",
    "tests/core/tiers",
    "tests/proof/record",
    "tests/package",
)
OWN = "tests/package/test_compiled.py"
CASES = (
    "replay/outputs-replicas",
    "replay/sample-small-pool",
    "replay/pages-of-48",
    "replay/closed-loop-replicas",
    "replay/sessions-speedup",
    "replay/priorities-few",
    "replay/fitted-other",
    "replay/roofline-windows",
    "replay/linear-step",
    "tiers/disk-lazy",
    "tiers/replicas",
    "shared/health",
    "story/lazy",
    "python/ledger",
)
"""What is compared: the part of the names of cases."""


def modules() -> list[str]:
    """Return the modules that are compiled."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[str] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    return found


def build_wheel(folder: Path, *, compiles: bool) -> Path:
    """Build the wheel into `folder`, say what it took, and return it."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, env={**os.environ, "KVARTS_COMPILE": "1" if compiles else "0"}, check=True)
    [wheel] = folder.glob("*.whl")
    seconds = time.perf_counter() - start
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, built in {seconds:.0f} s", flush=True)
    return wheel


def environment(source: Path) -> dict[str, str]:
    """Return an environment in which kvarts is imported from `source`."""
    return {**os.environ, "PYTHONPATH": str(source), "KVARTS_BUILD": "compiled"}


def run_tests(source: Path, tests: list[str]) -> bool:
    """Run tests on the build in `source`; return whether they pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", OWN, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment(source), check=False).returncode == 0


def compare_bytes(build: Path) -> bool:
    """Compare the bytes that this checkout and the build write; return whether they are the same."""
    only = [part for name in CASES for part in ("--only", name)]
    command = [sys.executable, str(ROOT / "scripts" / "same_bytes.py"), str(ROOT), str(build), "--exactly", *only]
    return subprocess.run(command, check=False).returncode == 0


def build_both(folder: Path, build: Path) -> None:
    """Build both wheels into `folder`, and unpack the compiled one to `build`, if there is a C compiler."""
    build_wheel(folder / "interpreted", compiles=False)
    wheel = build_wheel(folder / "compiled", compiles=True)
    if not wheel.name.endswith("-none-any.whl"):
        zipfile.ZipFile(wheel).extractall(build / "src")


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="build into DIR, a new directory, and leave it there")
    parser.add_argument("--built", type=Path, metavar="DIR", help="use what --keep left in DIR")
    parser.add_argument("--no-tests", action="store_true", help="run no tests")
    parser.add_argument("--no-bytes", action="store_true", help="compare no bytes")
    parser.add_argument("tests", nargs="*", metavar="TEST", help=f"default: {' '.join(TESTS)}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        build: Path = args.built or args.keep or Path(temporary) / "build"
        if args.built is None:
            build_both(Path(temporary), build)
        if not (build / "src").exists():
            print("skipped: there is no C compiler, so there is no compiled build")
            return 0
        good = args.no_tests or run_tests(build / "src", args.tests or list(TESTS))
        return 0 if (args.no_bytes or compare_bytes(build)) and good else 1


if __name__ == "__main__":
    sys.exit(main())
