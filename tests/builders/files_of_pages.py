"""Files that examples of the docs name: `toml` blocks whose first line is a comment with the name of a file."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
NAMED = re.compile(r"^```toml\n# ([\w-]+\.toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_files_of_pages(folder: Path) -> None:
    """Write these files of all pages into `folder`."""
    for page in sorted(DOCS.rglob("*.md")):
        for name, text in NAMED.findall(page.read_text()):
            (folder / name).write_text(text)
