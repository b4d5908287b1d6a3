"""Show that the compiled wheel is kvarts as well: build and install it, run the laws on it, and compare its bytes.

    python scripts/compiled_build.py [--keep DIR | --built DIR] [--no-tests] [--no-bytes] [TEST ...]

Both wheels are built from the source distribution of this checkout: one where no compiler can be found, which must be
pure, and one compiled. pip installs the compiled one into `src` in a temporary folder, or in DIR, which keeps the wheel
as well; the installed command must pass the test command of `[tool.cibuildwheel]`. Tests (TESTS unless given) import
kvarts from there: it is checked that every module on the list in pyproject.toml is a library. Then `same_bytes.py`
compares reports, requests, timelines and journals with those of the sources. Prints what the wheels took and how large
they are. Exits with 1 if anything fails, and with 0 and a message if there is no C compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
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


def build_sdist(folder: Path) -> Path:
    """Build the source distribution into `folder`, and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    [source] = folder.glob("*.tar.gz")
    return source


def build_wheel(source: Path, folder: Path, variables: dict[str, str]) -> Path:
    """Build the wheel of a source distribution into `folder`, say what it took, and return it."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, env={**os.environ, "KVARTS_COMPILE": "1", **variables}, check=True)
    [wheel] = folder.glob("*.whl")
    seconds = time.perf_counter() - start
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, built in {seconds:.0f} s", flush=True)
    return wheel


def is_pure(wheel: Path) -> bool:
    """Return whether a wheel has no libraries, by its name."""
    return wheel.name.endswith("-none-any.whl")


def install(wheel: Path, build: Path) -> None:
    """Install a compiled wheel into `src` in `build`, keep it there, and run its test command."""
    source = build / "src"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(source), str(wheel)]
    subprocess.run(command, check=True)
    shutil.copy(wheel, build)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    path = f"{source.resolve() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PYTHONPATH": str(source.resolve()), "PATH": path}
    test_command = project["tool"]["cibuildwheel"]["test-command"]
    subprocess.run(["bash", "-ec", test_command], cwd=build, env=variables, check=True, stdout=subprocess.DEVNULL)


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
    """Build both wheels in `folder`, and install the compiled one in `build`, if there is a C compiler."""
    source = build_sdist(folder)
    wheel = build_wheel(source, folder / "interpreted", {"CC": str(folder / "no-compiler")})
    assert is_pure(wheel), f"{wheel.name} was built without a compiler"
    wheel = build_wheel(source, folder / "compiled", {})
    if not is_pure(wheel):
        install(wheel, build)


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
