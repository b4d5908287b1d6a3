"""Lock the dependencies of CI: `.ci/requirements.txt`, and those of the extras `torch` and `docs`, with hashes.

`python scripts/lock.py` resolves `pyproject.toml` again with uv (`pip install uv`), for Python 3.11 and later on every
platform. PyTorch, and the CUDA packages that only its wheels from PyPI need, are not locked: torch is pinned to one
version, and builds of that version for a CPU or a CUDA release are other files than those of PyPI.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / ".ci" / "requirements.txt"
ADDED = {"torch": "torch itself is installed after these", "docs": "these build the documentation site"}
"""Extras that are installed after the lock, in this order, each with a note for its file."""
NOT_LOCKED = re.compile(r"(torch|triton|cuda-|nvidia-)")
BUILD = ("hatchling>=1.25", "editables>=0.5")
"""What installs the project itself, where pip is told not to fetch it by itself."""
HEAD = "# Made by scripts/lock.py. Installed with pip --require-hashes.\n"


def resolved(uv: str, *extras: str, more: tuple[str, ...] = ()) -> list[str]:
    """Return requirements with their hashes, each as its lines."""
    with tempfile.TemporaryDirectory() as folder:
        also = Path(folder) / "also.in"
        also.write_text("".join(f"{name}\n" for name in more))
        out = Path(folder) / "out.txt"
        options = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate", "-q"]
        named = [word for extra in extras for word in ("--extra", extra)]
        command = [uv, "pip", "compile", *options, *named, str(ROOT / "pyproject.toml"), str(also), "-o", str(out)]
        subprocess.run(command, check=True, cwd=ROOT)
        return re.findall(r"^\S+==[^\n]*\\\n(?:    --hash[^\n]*\n)+", out.read_text(), re.MULTILINE)


def main() -> int:
    """Write the files."""
    uv = shutil.which("uv")
    if uv is None:
        print("there is no uv: pip install uv", file=sys.stderr)
        return 2
    of_dev = resolved(uv, "dev", more=BUILD)
    LOCK.write_text(HEAD + "".join(of_dev))
    named = {requirement.split("==")[0] for requirement in of_dev}
    extras = ["dev"]
    for extra, note in ADDED.items():
        extras.append(extra)
        more = [
            requirement
            for requirement in resolved(uv, *extras, more=BUILD)
            if requirement.split("==")[0] not in named and not NOT_LOCKED.match(requirement)
        ]
        named |= {requirement.split("==")[0] for requirement in more}
        LOCK.with_name(f"requirements-{extra}.txt").write_text(f"{HEAD}# With --no-deps: {note}.\n" + "".join(more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
