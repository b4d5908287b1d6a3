"""Write what examples of the docs print today into the docs: for a change of numbers that is meant.

    python scripts/regenerate_examples.py [PAGE ...]

Of `console` blocks, each `$ kvarts` command is run in a folder of its own, and what it prints takes the
place of what follows it. Where that has lines of `...`, the lines between them are those of the output that are most
like the old ones. Look at the difference before it is committed: a line that is gone is no number that has changed.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IN_ORDER = {"first-ten-minutes.md", "transcript-log-to-gpus.md"}
"""Pages of which all examples run in one folder, `python` blocks too; `...` alone stands for what was not seen yet."""
CONSOLE = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"(?<=^```python\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)


def prepare(folder: Path) -> None:
    """Put the files there that examples name and that are not bundled."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    from builders.chat_logs import write_chat_logs
    from builders.claude_sessions import write_claude_sessions
    from builders.files_of_pages import write_files_of_pages

    (folder / "prompts.jsonl").write_text('{"prompt": "once upon a time"}\n{"prompt": "once upon a hill"}\n')
    write_claude_sessions(folder / ".claude" / "projects")
    write_chat_logs(folder / "logs")
    write_files_of_pages(folder)


def printed(line: str, folder: Path) -> str:
    """Return what a command prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{line}: exit code {done.returncode}", file=sys.stderr)
        return done.stdout + done.stderr
    return done.stdout


def renewed(expected: str, output: str, *, is_new: bool) -> str:
    """Return `expected` with the lines of `output` that are most like its own; `...` stays where it is.

    `is_new`: `...` alone is an output that nobody has seen yet, and takes all of it.
    """
    if "..." not in expected or (is_new and expected == "...\n"):
        return output if not expected.endswith("\n\n") else output + "\n"
    lines = output.splitlines()
    kept, start = [], 0
    for old in expected.splitlines():
        if old.strip() == "..." or not old.strip() or "..." in old:
            kept.append(old)
            continue
        ratios = [difflib.SequenceMatcher(None, _words(old), _words(line)).ratio() for line in lines[start:]]
        best = max(range(len(ratios)), key=lambda place: ratios[place], default=None)
        if best is None or ratios[best] < 0.3:
            print(f"  nothing like: {old}", file=sys.stderr)
            kept.append(old)
            continue
        kept.append(lines[start + best])
        start += best + 1
    return "\n".join(kept) + "\n"


def _words(line: str) -> list[str]:
    """Return the words of a line with all numbers the same."""
    return ["0" if re.fullmatch(r"[-+~\d.,:]+", word) else word for word in line.split()]


def regenerate(page: Path) -> None:
    """Write a page again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if page.name in IN_ORDER:
            for code in PYTHON.findall(page.read_text()):
                subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)

        def of_block(match: re.Match[str]) -> str:
            first, *commands = re.split(r"^\$ ", match[1], flags=re.MULTILINE)
            out = first
            for command in commands:
                head, expected = command.split("\n", 1)
                while head.endswith("\\"):
                    more, expected = expected.split("\n", 1)
                    head = f"{head}\n{more}"
                line = head.replace("\\\n", " ")
                out += f"$ {head}\n" + renewed(expected, printed(line, folder), is_new=page.name in IN_ORDER)
            return out

        page.write_text(CONSOLE.sub(of_block, page.read_text()))


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        print(path, file=sys.stderr)
        regenerate(path)
