"""Documents: piped text depends on the content alone, and a terminal shows the same cells."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.base.documents import Column, Document, Table

rich_console = pytest.importorskip("rich.console", reason="a dependency of kvarts")

CELLS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=12)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    num_columns = draw(st.integers(1, 5))
    columns = [Column(draw(CELLS), draw(st.integers(0, 14)), is_text=draw(st.booleans())) for _ in range(num_columns)]
    rows = draw(st.lists(st.lists(CELLS, min_size=num_columns, max_size=num_columns), max_size=4))
    return Table(columns, rows, indent=draw(st.integers(0, 3)))


def shown(document: Document, width: int) -> str:
    with io.StringIO() as file:
        document.show(rich_console.Console(file=file, width=width, color_system=None))
        return file.getvalue()


@given(tables())
def test_every_column_is_as_wide_as_its_longest_cell_and_aligned(table: Table) -> None:
    heads = [each.head for each in table.columns]
    rows = [heads, *table.rows] if any(heads) else list(table.rows)
    lines = table.lines()
    assert len(lines) == len(rows) and not any(line.endswith(" ") for line in lines)
    ends = [table.indent]
    for place, each in enumerate(table.columns):
        longest = max((len(row[place]) for row in (heads, *table.rows)), default=0)
        ends.append(ends[-1] + max(each.least, longest + (place > 0 and not each.is_text)))
    for line, row in zip(lines, rows, strict=True):
        for (start, end), each, cell in zip(pairwise(ends), table.columns, row, strict=True):
            part = line.ljust(ends[-1])[start:end]
            assert part == (cell.ljust(end - start) if each.is_text else cell.rjust(end - start))


@settings(deadline=None)
@given(tables(), st.integers(1, 200))
def test_a_terminal_shows_the_same_text_whatever_its_width(table: Table, width: int) -> None:
    """A wide terminal shows cells at the same places, a narrow one folds them: no character is lost."""
    document = Document.of(["before", "", table, "after"])
    wide = [line.rstrip() for line in shown(document, 500).splitlines()]
    assert wide == [line.rstrip() for line in document.splitlines()]
    if width >= 40:
        heads = [each.head for each in table.columns] if any(each.head for each in table.columns) else []
        expected = sorted("".join([*heads, *(cell for row in table.rows for cell in row), "before", "after"]))
        assert sorted(re.sub(r"\s", "", shown(document, width))) == expected


def test_markup_and_control_characters_of_cells_are_text() -> None:
    table = Table([Column("[bold]name", 0, is_text=True)], [["[red]x[/red]"], ["a\x1b[31mb"]])
    assert shown(Document.of([table, "[/]\x1b"]), 80).splitlines() == [
        "[bold]name  ", "[red]x[/red]", r"a\x1b[31mb  ", r"[/]\x1b"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_terminal_gets_heads_in_bold_and_a_pipe_plain_text() -> None:
    command = [sys.executable, "-m", "kvarts", "replay", "sample:mooncake"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in piped
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=env) as process:
        os.close(theirs)
        came = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:
                break
            if not part:
                break
            came += part
        assert process.wait() == 0
    os.close(ours)
    text = came.decode().replace("\r\n", "\n")
    assert re.search(r"\x1b\[1m +mean\x1b\[0m", text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert [line.split() for line in plain.splitlines()] == [line.split() for line in piped.splitlines()]
