"""Count class names that occur more than once in src/kvarts, and hold their number to a budget that only falls.

    python scripts/class_names.py [--list]

A name that stands for two things makes a reader look up which one is meant. Private classes and generated files do not
count. `--list` prints each name with its files.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 7


def duplicates(package: Path) -> dict[str, list[Path]]:
    """Return the public class names that occur more than once, each with its files."""
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if "proto" in path.relative_to(package).parts:
            continue  # generated
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path)
    return {name: paths for name, paths in sorted(files.items()) if len(paths) > 1}


def main() -> int:
    """Print the number of names; return 1 if it is above the budget, or the budget could fall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="Print each name with its files.")
    arguments = parser.parse_args()
    found = duplicates(ROOT / "src" / "kvarts")
    if arguments.list:
        for name, paths in found.items():
            print(f"{name}: {', '.join(str(path.relative_to(ROOT / 'src' / 'kvarts')) for path in paths)}")
    print(f"{len(found)} class names occur more than once; the budget is {BUDGET}")
    if len(found) > BUDGET:
        print("rename the new one: --list has all", file=sys.stderr)
    elif len(found) < BUDGET:
        print(f"lower BUDGET in {Path(__file__).name}", file=sys.stderr)
    return int(len(found) != BUDGET)


if __name__ == "__main__":
    sys.exit(main())
