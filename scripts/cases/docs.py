"""Cases from the documentation: its console examples, its Python, its TOML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from cases.case import Case, Command, case
from cases.inputs import SAMPLE

__all__ = ["docs_cases"]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULTS = {"--pages": "32768", "--page-size": "16", "--cost": "polynomial"}
MEASURED = {"profile", "calibrate"}
"""Commands whose examples say what a machine took, or take long; other cases stand for some of them."""


def explicit(arguments: list[str]) -> list[str]:
    """Return a `replay` command with its traffic and settings spelled out, where the example leaves them open."""
    is_shared = any(re.match(r"[\w.-]+=", word) for word in arguments)
    has_device = "--device" in arguments
    has_trace = "--config" in arguments or (len(arguments) > 1 and not arguments[1].startswith("-"))
    if is_shared:
        return arguments
    spelled = [arguments[0], *([] if has_trace else [SAMPLE]), *arguments[1:]]
    for option, value in DEFAULTS.items():
        if option not in spelled and not (has_device and option != "--page-size"):
            spelled += [option, value]
    return spelled


def commands_of(text: str) -> Iterator[Command]:
    """Yield the commands of a console block."""
    for line in re.findall(r"^\$ kvarts (.*)$", text, re.MULTILINE):
        arguments = shlex.split(line)
        yield Command("kvarts", tuple(explicit(arguments) if arguments[0] == "replay" else arguments))


def docs_cases(before: Path) -> Iterator[Case]:
    """Yield a case for each example of README.md and docs/ of the checkout `before`."""
    for page in [before / "README.md", *sorted((before / "docs").rglob("*.md"))]:
        name = f"docs/{page.stem}"
        needs_torch = page.stem == "guide-models"
        for index, (kind, text) in enumerate(BLOCK.findall(page.read_text())):
            if kind == "console":
                commands = tuple(commands_of(text))
                if not MEASURED & {command.arguments[0] for command in commands}:
                    yield Case(f"{name}-{index}", commands, needs_torch=needs_torch)
            elif kind == "python":
                program = f"sample_path = {SAMPLE!r}\n{text}"
                if "uuid4" not in text:  # what it prints is random
                    yield Case(
                        f"{name}-{index}",
                        (Command("python", ("example.py",)),),
                        {"example.py": program},
                        needs_torch=needs_torch,
                    )
            elif kind == "toml":
                trace = "" if re.search(r"^\[(models|workload)", text, re.MULTILINE) else SAMPLE
                yield case(f"{name}-{index}", f"kvarts replay {trace} --config c.toml --json", files={"c.toml": text})
