"""Show that rooms of kvarts can be deleted: in a copy, a room and what belongs to it go, and all else still works.

    python scripts/deletion_drills.py [--only ROOM ...] [--keep] [--no-tests] [--jobs N]

What belongs to a room: its folders, its tests, every test module that imports it (or that imports such a module), the
files of `kvarts.cli` named for it or for its commands (ROOM.py, ROOM_*.py, *_ROOM.py), and the lines of the rest of
`kvarts.cli`, of the front door, of the table of moved modules and of the lists in pyproject.toml that name it
(`removal.py` finds them). Rooms that stand on it go before it. Then, in the copy:

1. every module of kvarts is imported, but for those that need something optional that is not installed;
2. mypy checks src and tests;
3. tests run, with few examples (KVARTS_HYPOTHESIS=drill) and without those marked `long`.

Besides the drills of one room each, `all` deletes all of them one after the other; after each, everything is imported;
types and tests come at the end. The whole suite runs for `all`. For one room only tests of the rooms above run, which
are the ones that may import the deleted room, and those of the command line, its edges, the front door and the docs:
rooms below cannot import it, says import-linter, and their tests run in `all`. So do some slow tests (SLOW).

Exits with 1 if a drill fails, and says what went wrong. `--keep` leaves the copies and says where they are.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from removal import CannotRemoveError, Gone, imports_gone, without, without_listed

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900
ALL = "all"

ROOMS = {
    "plan": ("plan",),
    "fleet": ("fleet", "openai_api/fleet"),
    "sharing": ("sharing", "openai_api/sharing"),
    "connect_vllm": ("connect/vllm",),
    "offload": ("offload",),
    "record": ("record",),
    "audit": ("audit",),
    "explain": ("explain",),
    "connect": ("connect",),
    "kv_events": ("serve/kv_events",),
    "routers": ("routers",),
    "openai_api": ("openai_api",),
    "session": ("session", "serve", "client", "proto", "openai_api/sessions"),
    "llm": ("llm", "executor/torch"),
}
"""Each room that can be deleted, and its folders, in the order in which the drill of all deletes them."""

NEEDED_BY = {
    "routers": ("plan",),
    "offload": ("connect_vllm",),
    "connect": ("connect_vllm",),
    "llm": ("kv_events", "session", "openai_api"),
    "session": ("kv_events",),
}
"""Rooms that stand on another, and go with it."""

COMMANDS = {
    "connect": ("watch",),
    "fleet": ("mock_fleet",),
    "openai_api": ("http", "mock", "serve_model"),
    "plan": ("sweep",),
    "session": ("serve_sessions", "sessions", "soak"),
}
"""Commands of a room under other names."""

ALWAYS_TESTED = ("cli", "docs", "edges", "values")
"""Folders of tests that run in every drill."""

PLUGIN = "kvarts_server"
"""The plugin of pytest, by the name under which it is installed."""

SLOW = (
    "tests/values/test_front_door.py::test_verify_is_a_room_and_a_function_in_whatever_order",
    "tests/verify/test_layouts.py::test_the_layout_of_a_file_does_not_matter",
)
"""Tests that take seconds each and need no room that can be deleted: they run in the drill of all only."""

OPTIONAL = [
    "flash_attn",
    "google",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "httptools",
    "llvmlite",
    "numba",
    "openai",
    "prometheus_client",
    "pyarrow",
    "safetensors",
    "scipy",
    "selenium",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
    "triton",
    "uvicorn",
    "uvloop",
    "vllm",
    "zmq",
]
"""What an installation may lack; modules that import it cannot be imported then."""

IMPORT_ALL = """
import importlib, pkgutil, sys, kvarts
assert kvarts.__file__.startswith(sys.argv[1]), f"imported {kvarts.__file__}, which is not the copy"
optional, skipped, count = set(sys.argv[2:]), [], 0
for module in pkgutil.walk_packages(kvarts.__path__, "kvarts."):
    if module.name == "kvarts.__main__":
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            raise
        skipped.append(module.name)
for name in kvarts.__all__:
    try:
        getattr(kvarts, name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in optional:
            raise
print(f"{count} modules" + (f", without {len(skipped)} that need what is not installed" if skipped else ""))
"""


class DrillFailedError(Exception):
    """What went wrong, at length."""


@dataclass
class Drill:
    """One deletion in a copy, and what was found. `rooms` are deleted in this order."""

    name: str
    rooms: tuple[str, ...]
    copy: Path
    account: list[str] = field(default_factory=list)

    def run(self, *, with_tests: bool) -> bool:
        """Run it; return whether all went well."""
        try:
            copy_tracked(self.copy)
            gone = Gone(())
            for room in self.rooms:
                gone = self._delete(room, gone)
                self._import_all()
            self._check_types()
            if with_tests:
                self._run_tests()
        except (DrillFailedError, CannotRemoveError) as error:
            self.account.append(f"FAILED: {error}")
            return False
        return True

    def _delete(self, room: str, gone: Gone) -> Gone:
        """Delete a room; return it and what was `gone` before."""
        package, tests = self.copy / "src" / "kvarts", self.copy / "tests"
        modules = [*gone.modules]
        for folder in ROOMS[room]:
            if not (package / folder).exists():
                continue  # it is in a room that is gone already
            shutil.rmtree(package / folder)
            modules.append(f"kvarts.{folder.replace('/', '.')}")
            shutil.rmtree(tests / folder, ignore_errors=True)
        commands = set(gone.commands)
        cli = package / "cli"
        for name in (room, *COMMANDS.get(room, ())):
            found = {path for form in ("{}.py", "{}_*.py", "*_{}.py") for path in cli.glob(form.format(name))}
            for path in sorted(found):
                path.unlink()
                commands.add(path.stem)
        front_door = package / "__init__.py"
        gone = Gone(tuple(modules), frozenset(commands))
        gone = Gone(gone.modules, gone.commands, gone.names | names_from(front_door.read_text(), gone))
        num_lines = 0
        for path in (*sorted((package / "cli").rglob("*.py")), front_door):
            before = path.read_text()
            after = without(before, gone, path=str(path.relative_to(self.copy)))
            path.write_text(after)
            num_lines += before.count("\n") - after.count("\n")
        settings = self.copy / "pyproject.toml"
        settings.write_text(without_listed(settings.read_text(), gone))
        gone, removed = delete_tests(tests, gone)
        self.account.append(f"deleted {room}, and {num_lines} lines that name it; tests: {', '.join(removed) or '-'}")
        return gone

    def _import_all(self) -> None:
        output = self._check("import", [sys.executable, "-W", "error", "-c", IMPORT_ALL, str(self.copy), *OPTIONAL])
        self.account.append(f"imports {output.strip()}")

    def _check_types(self) -> None:
        # What mypy knows of the checkout holds for all files of the copy that are the same.
        cache = ROOT / ".mypy_cache"
        if cache.is_dir():
            shutil.copytree(cache, self.copy / ".mypy_cache")
        output = self._check("mypy", [sys.executable, "-m", "mypy", "src", "tests"])
        self.account.append(f"mypy: {output.strip().splitlines()[-1]}")

    def _run_tests(self) -> None:
        folders = [] if self.name == ALL else tested_folders(self.copy, self.rooms)
        left_out = [] if self.name == ALL else [f"--deselect={test}" for test in SLOW]
        options = ["-q", "-m", "not long", "--maxfail=20", "-n", "0", "-p", "no:cacheprovider"]
        if "openai_api" in self.rooms:
            options += ["-p", f"no:{PLUGIN}"]  # it is installed beside the copy, and named there
        command = [sys.executable, "-m", "pytest", *options, *left_out, *folders]
        output = self._check("pytest", command)
        self.account.append(f"tests of {' '.join(folders) or 'everything'}: {output.strip().splitlines()[-1]}")

    def _check(self, what: str, command: Sequence[str]) -> str:
        """Run a command in the copy; return its output. Raise DrillFailedError if it fails."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KVARTS_", "PYTHON"))},
            # The copy before all else; what this process found there, since pip installs nothing that was found so.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.copy / "src"), os.environ.get("PYTHONPATH")])),
            "KVARTS_HYPOTHESIS": "drill",
        }
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.copy,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        seconds = time.monotonic() - started
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-60:])
            raise DrillFailedError(f"{what}, after {seconds:.0f} s, exit code {done.returncode}:\n{tail}")
        return f"{done.stdout.rstrip()} ({seconds:.0f} s)"


def copy_tracked(target: Path) -> None:
    """Copy the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def names_from(front_door: str, gone: Gone) -> frozenset[str]:
    """Return the names of the front door that come from what is gone."""
    imports = [node for node in ast.walk(ast.parse(front_door)) if isinstance(node, ast.ImportFrom)]
    return frozenset(alias.name for node in imports for alias in gone.imported_by(node))


def delete_tests(tests: Path, gone: Gone) -> tuple[Gone, list[str]]:
    """Delete test modules that import what is gone, until none does. Return what is gone now, and their names."""
    removed: list[str] = []
    found = True
    while found:
        found = False
        for path in sorted(tests.rglob("*.py")):
            if not imports_gone(path.read_text(), gone):
                continue
            name = str(path.relative_to(tests))
            if path.name == "conftest.py":
                raise DrillFailedError(f"tests/{name} imports the room, and every test needs it")
            path.unlink()
            removed.append(name)
            module = name.removesuffix(".py").replace("/", ".")
            gone = Gone((*gone.modules, module), gone.commands, gone.names)
            found = True
    return gone, removed


def tested_folders(copy: Path, rooms: Iterable[str]) -> list[str]:
    """Return the folders of tests of the rooms above `rooms`, and of those tested always."""
    settings = tomllib.loads((copy / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    ordered = [[room.strip() for room in layer.split("|")] for layer in layers]
    known = {room for layer in ordered for room in layer}
    names = {room if room in known else ROOMS[room][0].partition("/")[0] for room in rooms}
    lowest = max(index for index, layer in enumerate(ordered) if set(layer) & names)
    above = [room for layer in ordered[:lowest] for room in layer]
    return [f"tests/{room}" for room in sorted({*above, *ALWAYS_TESTED}) if any((copy / "tests" / room).glob("test_*"))]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ROOM", action="append", choices=[*ROOMS, ALL], help="This drill only.")
    parser.add_argument("--keep", action="store_true", help="Leave the copies.")
    parser.add_argument("--no-tests", action="store_true", help="Import and check types, no more.")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="Drills at a time. [2]")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the drills; return the exit code."""
    arguments = parse_arguments()
    names = arguments.only or [ALL, *ROOMS]  # the longest first
    parent = Path(tempfile.mkdtemp(prefix="kvarts-drills-")).resolve()
    failed = []

    def run(name: str) -> tuple[Drill, bool, float]:
        started = time.monotonic()
        drill = Drill(name, tuple(ROOMS) if name == ALL else (*NEEDED_BY.get(name, ()), name), parent / name)
        return drill, drill.run(with_tests=not arguments.no_tests), time.monotonic() - started

    try:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for drill, is_well, seconds in pool.map(run, names):
                print(f"{drill.name}: {'passed' if is_well else 'FAILED'} in {seconds:.0f} s", flush=True)
                for line in drill.account:
                    print("  " + line.replace("\n", "\n    "), flush=True)
                if not is_well:
                    failed.append(drill.name)
    finally:
        if arguments.keep:
            print(f"copies are in {parent}")
        else:
            shutil.rmtree(parent)
    if failed:
        print(f"deletion drills failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
