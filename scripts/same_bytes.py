"""Show that two checkouts of kvarts write the same bytes: every case in `cases` is run in both and compared.

    python scripts/same_bytes.py BEFORE [AFTER]

BEFORE and AFTER are directories of checkouts; AFTER is this one unless given. Compared are the standard output, the
standard error and the exit code of each command of a case, and every file that the case left, also inside .gz. What is
to differ on purpose stands in `renamed.py`. Exits with 1 if anything differs, or if a case is broken: a command ended
in BEFORE with another exit code than the table says, so that it does not show what it is there for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from artefacts import Artefacts, first_difference, read_files
from cases import all_cases
from cases.case import Case, Command
from cases.inputs import write_inputs
from renamed import RENAMED, Renamed

PROGRESS = re.compile(rb"^kvarts: [^\n]*: [\d,]+( s|( of [\d,]+)? \w+)\n", re.MULTILINE)
"""What is said after two seconds depends on the machine."""

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600


@dataclass(frozen=True)
class Checkout:
    """One side: the directory of a checkout, the interpreter that runs it, and where that keeps its byte code."""

    name: str
    path: Path
    python: Path
    caches: Path

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands: its own kvarts, and another hash seed for each process."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVARTS_", "PYTHON"))}
        python = {"PYTHONPATH": str(self.path / "src"), "PYTHONPYCACHEPREFIX": str(self.caches / self.name)}
        return {**kept, **python, "COLUMNS": "100", "NO_COLOR": "1"}

    def command(self, command: Command) -> list[str]:
        """Return what the system is to run for `command`."""
        return [str(self.python), *(("-m", "kvarts") if command.program == "kvarts" else ()), *command.arguments]

    def check(self) -> None:
        """Exit unless its interpreter imports its kvarts."""
        found = subprocess.run(
            [str(self.python), "-c", "import kvarts, sys; sys.stdout.write(kvarts.__file__)"],
            env=self.environment(),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode or not Path(found.stdout).is_relative_to(self.path / "src"):
            sys.exit(f"{self.name}: {self.python} does not import kvarts from {self.path / 'src'}\n{found.stderr}")


@dataclass
class Outcome:
    """What one case showed: the artefacts that differ, each with the first difference, and the renames it needed."""

    case: Case
    on_purpose: list[Renamed]
    num_artefacts: int = 0
    differences: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    renames: set[Renamed] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether both checkouts wrote the same, and the case showed what it is there for."""
        return not self.differences and not self.broken


def run_side(case: Case, side: Checkout, folder: Path, inputs: Path) -> tuple[Artefacts, list[str]]:
    """Run the commands of `case` in `folder`, a path that both sides see; return what they left.

    With it, a line for each command that did not end with the exit code that the table says.
    """
    folder.mkdir()
    for path in inputs.iterdir():
        (folder / path.name).symlink_to(path)
    for name, text in case.files.items():
        (folder / name).write_text(text)
    artefacts: Artefacts = {}
    unexpected = []
    for number, command in enumerate(case.commands, 1):
        place = f"{number}." if len(case.commands) > 1 else ""
        try:
            done = subprocess.run(
                side.command(command),
                env=side.environment(),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            unexpected.append(f"{side.name}: {command} took more than {TIMEOUT_S} s")
            break
        if done.returncode != command.exit_code:
            tail = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
            unexpected.append(f"{side.name}: {command} exited with {done.returncode}: {tail}")
        artefacts[f"{place}exit code"] = str(done.returncode).encode()
        artefacts[f"{place}stdout"] = done.stdout
        artefacts[f"{place}stderr"] = PROGRESS.sub(b"", done.stderr).replace(str(side.path).encode(), b"CHECKOUT")
    artefacts.update(read_files(folder))
    shutil.rmtree(folder)
    return artefacts, unexpected


def rename(case: Case, artefact: str, before: bytes, after: bytes, outcome: Outcome) -> tuple[bytes, bytes]:
    """Return both sides with what differs on purpose made equal; `outcome` learns which entries were needed."""
    for entry in outcome.on_purpose:
        if fnmatchcase(f"{case.name}/{artefact}", entry.artefact):
            changed = entry.pattern.sub(entry.becomes, before if entry.side == "before" else after)
            if entry.side == "before" and changed != before:
                before = changed
            elif entry.side == "after" and changed != after:
                after = changed
            else:
                continue
            outcome.renames.add(entry)
    return before, after


def compare(case: Case, before: Artefacts, after: Artefacts, outcome: Outcome) -> None:
    """Emit `outcome` every artefact that differs. A .gz is told by what is inside, if that differs as well."""
    outcome.num_artefacts = len(before)
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in after or name not in before:
            outcome.differences.append(f"{name}: only {'BEFORE' if name in before else 'AFTER'} wrote it")
            continue
        inside = f"{name}!inside"
        if inside in before and inside in after and before[inside] != after[inside]:
            continue  # what is inside comes next, and says more; it may differ on purpose
        ours, theirs = rename(case, name, before[name], after[name], outcome)
        if ours != theirs:
            outcome.differences.append(f"{name}: {first_difference(ours, theirs)}")


def run_case(
    case: Case, sides: tuple[Checkout, Checkout], folder: Path, inputs: Path, on_purpose: list[Renamed]
) -> Outcome:
    """Run `case` in both checkouts, one after the other at the same path, and compare."""
    start = time.perf_counter()
    outcome = Outcome(case, on_purpose)
    before, broken = run_side(case, sides[0], folder, inputs)
    after, _ = run_side(case, sides[1], folder, inputs)
    outcome.broken = broken
    compare(case, before, after, outcome)
    outcome.seconds = time.perf_counter() - start
    return outcome


def is_asked_for(case: Case, only: list[str]) -> bool:
    """Return whether the name of `case` contains one of `only`, or nothing is asked for by name."""
    return not only or any(part in case.name for part in only)


def wanted(cases: list[Case], args: argparse.Namespace) -> Iterator[Case]:
    """Pick the cases that `args` ask for, and say of those left out for another reason why."""
    for case in cases:
        if not is_asked_for(case, args.only):
            continue
        if case.is_whole and not args.whole:
            print(f"skipped  {case.name}: a whole trace, give --whole")
        elif case.needs_torch and not args.torch:
            print(f"skipped  {case.name}: a real model, give --torch")
        elif missing := [path for path in case.needs if not path.exists()]:
            print(f"skipped  {case.name}: there is no {missing[0]}, give --data")
        else:
            yield case


def emit(outcome: Outcome) -> None:
    """Print what a case showed."""
    word = "broken " if outcome.broken else "differs" if outcome.differences else "same   "
    print(f"{word}  {outcome.case.name}  ({outcome.num_artefacts} artefacts, {outcome.seconds:.1f} s)", flush=True)
    for line in (*outcome.broken, *outcome.differences):
        print(f"         {line}", flush=True)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a checkout")
    parser.add_argument("after", type=Path, metavar="AFTER", nargs="?", default=ROOT, help="another; default: this one")
    parser.add_argument("--python-before", type=Path, default=Path(sys.executable), help="default: the running one")
    parser.add_argument("--python-after", type=Path, default=Path(sys.executable), help="default: the running one")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SUBSTRING", help="only cases with it in their names; repeatable"
    )
    parser.add_argument("--exactly", action="store_true", help="nothing differs on purpose: one version, two builds")
    parser.add_argument("--list", action="store_true", help="print the cases and their commands, and run none")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time; default: 2")
    parser.add_argument("--data", type=Path, metavar="DIR", help="whole traces; default: KVARTS_DATA, ../shared/data")
    parser.add_argument("--whole", action="store_true", help="run cases of whole traces as well")
    parser.add_argument("--torch", action="store_true", help="run cases of real models as well")
    args = parser.parse_args()
    data = args.data or Path(os.environ.get("KVARTS_DATA") or ROOT.parent / "shared" / "data")
    cases = all_cases(args.before.resolve(), data.resolve())
    if args.list:
        for case in cases:
            if is_asked_for(case, args.only):
                print(case.name, *(f"    {command}" for command in case.commands), sep="\n")
        return 0
    start = time.perf_counter()
    outcomes = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(name).resolve()
        sides = (
            Checkout("BEFORE", args.before.resolve(), args.python_before.absolute(), folder / "caches"),
            Checkout("AFTER", args.after.resolve(), args.python_after.absolute(), folder / "caches"),
        )
        for side in sides:
            side.check()
        inputs = folder / "inputs"
        write_inputs(args.before.resolve(), inputs)
        started = [
            pool.submit(run_case, case, sides, folder / str(number), inputs, [] if args.exactly else RENAMED)
            for number, case in enumerate(wanted(cases, args))
        ]
        for future in started:
            outcomes.append(future.result())
            emit(outcomes[-1])
    for entry in dict.fromkeys(entry for outcome in outcomes for entry in outcome.renames):
        print(f"on purpose: {entry.artefact}: {entry.why}")
    bad = [outcome.case.name for outcome in outcomes if not outcome.is_good]
    num_artefacts = sum(outcome.num_artefacts for outcome in outcomes)
    print(
        f"{len(outcomes)} cases, {num_artefacts} artefacts, {time.perf_counter() - start:.0f} s: "
        f"{f'{len(bad)} differ or are broken: ' + ', '.join(bad) if bad else 'all the same'}"
    )
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
