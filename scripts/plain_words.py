"""Count turns of phrase that stop a native reader, room by room, and hold each room to its budget.

    python scripts/plain_words.py [--list ROOM] [--write]

Reads docstrings and comments of src/kvarts, and the prose of the docs and of the pages beside the README: code, tables
and what stands between backticks do not count. A room's budget is hits per 1,000 words, in plain_words.toml. It only
falls: a room above its budget is an error, and so is a budget above TARGET with more than SLACK to spare. `--write`
lowers budgets, and raises none. `--list` prints the lines of a room, the file with the most hits first.

A hit is a symptom: mend the sentence. CONTRIBUTING has the rules.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "scripts" / "plain_words.toml"
SLACK = 0.5
TARGET = 3.0
"""Native text has 1 to 3: no budget goes below."""
PER = 1000

_DETERMINERS = "an?|the|one|two|each|every|all|any|some|no|this|that|these|those|such|its|several|others?"
_VERBS = "is|are|was|were|be|has|have|had|can|goes|comes|came|follows|lies"
_COUNTED = "pages|tokens|requests|blocks|steps|bytes|rows|lines|files|calls|columns|numbers|objects|parts|turns|hits"
_UNITS = "step|page|group|token|request|second|session|tier|run|line|row|turn|model|layer|sequence|replica|worker"

TURNS = {
    "a clause with 'what' in place of a noun": rf"\bwhat (?:{_VERBS}|it|they|he|she|{_DETERMINERS}|nothing|to)\b",
    "'beside' for 'next to' or 'besides'": r"\bbeside\b",
    "a sentence that begins with 'of'": rf"(?:^|[.;:]\s)of (?:{_DETERMINERS}|them|it|what|which)\b",
    "'of which', 'of whom'": r"\bof (?:which|whom|what)\b",
    "'a step' for 'per step'": rf"\b(?:{_COUNTED}|ms|milliseconds|times|one|pair) an? (?:{_UNITS})\b",
    "code that says or tells": r"\b(?:says?|said|tells?|told)\b",
    "'is no', 'has none'": r"\b(?:is|are|was|were|has|have|had) (?:no|none)\b",
    "'alike', 'so many', 'anew'": r"\b(?:alike|so many|so long|anew|nought|above all|(?:by|for) itself)\b",
    "pages that go and come": r"\b(?:goes|gone|comes|came|go first|goes first|let go|(?:give|gives|gave|given) back)\b",
}
"""Turns of phrase, each with its pattern."""

_COMPILED = {name: re.compile(pattern, re.IGNORECASE | re.MULTILINE) for name, pattern in TURNS.items()}
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^\|.*$", re.MULTILINE)
_QUOTED = re.compile(r"`[^`]*`")


@dataclass
class Room:
    """The hits and words of one room. `lines`: by file, each hit with its line number and turn of phrase."""

    num_words: int = 0
    num_hits: int = 0
    lines: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Hits per 1,000 words."""
        return PER * self.num_hits / max(1, self.num_words)

    def read(self, path: Path, first_line: int, text: str) -> None:
        """Count one piece of text that begins at `first_line` of `path`."""
        text = _QUOTED.sub(lambda match: "`" + "\n" * match[0].count("\n"), text)
        self.num_words += len(_WORD.findall(text))
        for name, pattern in _COMPILED.items():
            for match in pattern.finditer(text):
                self.num_hits += 1
                number = first_line + text.count("\n", 0, match.start() + (match[0][:1] == "\n"))
                self.lines.setdefault(path, []).append(f"{number}: {name}: {' '.join(match[0].split())}")


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Return the docstrings and comments of a Python file, each with the line on which it begins."""
    nodes = ast.walk(ast.parse(source))
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def prose_of(page: str) -> str:
    """Return the prose of a Markdown page; what is left out leaves its line ends."""
    for pattern in (_FENCE, _TABLE):
        page = pattern.sub(lambda match: "\n" * match[0].count("\n"), page)
    return page


def count(root: Path) -> dict[str, Room]:
    """Return each room by its name: folders of src/kvarts, `kvarts` for the files beside them, `docs` and `pages`."""
    rooms: dict[str, Room] = {}
    package = root / "src" / "kvarts"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        if parts[0] == "proto":
            continue  # generated
        room = rooms.setdefault(parts[0] if len(parts) > 1 else "kvarts", Room())
        for line, text in texts_of(path.read_text()):
            room.read(path.relative_to(root), line, text)
    for name, paths in ("docs", sorted((root / "docs").rglob("*.md"))), ("pages", sorted(root.glob("*.md"))):
        room = rooms.setdefault(name, Room())
        for path in paths:
            room.read(path.relative_to(root), 1, prose_of(path.read_text()))
    return rooms


def faults(rooms: dict[str, Room], budgets: dict[str, float]) -> list[str]:
    """Return what is wrong with the budgets, a line for each room."""
    found = []
    for name, room in sorted(rooms.items()):
        budget = budgets.get(name)
        if budget is None:
            found.append(f"{name} has no budget: add it to {BUDGETS.name}, {room.rate:.1f} or less")
        elif room.rate > budget:
            found.append(f"{name}: {room.rate:.2f} per 1,000 words, and its budget is {budget}; see --list {name}")
        elif max(room.rate, TARGET) < budget - SLACK:
            found.append(f"{name}: {room.rate:.2f} per 1,000 words: lower its budget of {budget} with --write")
    found += [f"{name} is not there: take it out of {BUDGETS.name}" for name in sorted({*budgets} - {*rooms})]
    return found


def write(rooms: dict[str, Room], budgets: dict[str, float]) -> None:
    """Lower the budgets to what the rooms need, each to the next tenth above it."""
    lines = BUDGETS.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        name, equals, _ = line.partition(" = ")
        least = max(TARGET, math.ceil(rooms[name].rate * 10) / 10) if name in rooms else math.inf
        if equals and least < budgets[name]:
            lines[number] = f"{name} = {least:.1f}\n"
    BUDGETS.write_text("".join(lines))


def main() -> int:
    """Print each room with its budget; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="ROOM", help="Print the hits of a room, and judge nothing.")
    parser.add_argument("--write", action="store_true", help="Lower budgets that are higher than they need to be.")
    arguments = parser.parse_args()
    rooms = count(ROOT)
    if arguments.list is not None:
        if arguments.list not in rooms:
            parser.error(f"no room {arguments.list!r}: {', '.join(sorted(rooms))}")
        found = rooms[arguments.list].lines
        for path, lines in sorted(found.items(), key=lambda item: -len(item[1])):
            ordered = sorted(lines, key=lambda line: int(line.partition(":")[0]))
            print(f"{path}: {len(lines)}", *ordered, sep="\n  ")
        return 0
    budgets = tomllib.loads(BUDGETS.read_text())
    if arguments.write:
        write(rooms, budgets)
        budgets = tomllib.loads(BUDGETS.read_text())
    for name, room in sorted(rooms.items(), key=lambda item: -item[1].rate):
        print(f"{room.rate:5.1f}  {name} ({room.num_words:,} words; budget {budgets.get(name, '-')})")
    words = sum(room.num_words for room in rooms.values())
    hits = sum(room.num_hits for room in rooms.values())
    print(f"{PER * hits / words:5.1f}  in all of {words:,} words")
    wrong = faults(rooms, budgets)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
