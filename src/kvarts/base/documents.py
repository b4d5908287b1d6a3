"""Text with tables, laid out for a pipe, or by rich for a terminal. Piped text depends on the content alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from kvarts.base.terminal import plain

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Column", "Document", "Table"]


class Column(msgspec.Struct, frozen=True):
    """A head above cells. `least`: the least width of the column, including the gap before it.

    `is_text`: aligned to the left, and without a gap before it.
    """

    head: str
    least: int
    is_text: bool = False


class Table(msgspec.Struct, frozen=True):
    """Rows of cells below heads. `indent`: spaces before each line."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    indent: int = 0

    def gap(self, place: int) -> int:
        """Return the least number of spaces before the cells of a column."""
        return int(place > 0 and not self.columns[place].is_text)

    def lines(self) -> list[str]:
        """Return the table as lines, without trailing spaces."""
        heads = [each.head for each in self.columns]
        widths = [
            max([each.least, *(len(row[place]) + self.gap(place) for row in (heads, *self.rows))])
            for place, each in enumerate(self.columns)
        ]
        shown = [heads, *self.rows] if any(heads) else self.rows
        return [
            (
                " " * self.indent
                + "".join(
                    f"{cell:<{width}}" if each.is_text else f"{cell:>{width}}"
                    for each, cell, width in zip(self.columns, row, widths, strict=True)
                )
            ).rstrip()
            for row in shown
        ]


class Document(str):
    """The text of `blocks`, which are lines and tables; `show` fits the tables to a terminal."""

    __slots__ = ("blocks",)

    blocks: tuple[str | Table, ...]

    @classmethod
    def of(cls, blocks: Iterable[str | Table]) -> Self:
        """Return a document that ends with a line end."""
        blocks = tuple(blocks)
        lines = (line for block in blocks for line in ([block] if isinstance(block, str) else block.lines()))
        made = cls("".join(f"{line}\n" for line in lines))
        made.blocks = blocks
        return made

    def show(self, console: Console) -> None:
        """Print the document. Tables have bold heads, and their columns shrink to the width of the terminal."""
        from rich.padding import Padding
        from rich.table import Table as RichTable
        from rich.text import Text

        for block in self.blocks:
            if isinstance(block, str):
                console.print(Text(plain(block)), soft_wrap=True)
                continue
            shown = RichTable(box=None, padding=0, pad_edge=False, header_style="bold",
                              show_header=any(each.head for each in block.columns))  # fmt: skip
            gaps = [" " * block.gap(place) for place in range(len(block.columns))]  # these do not shrink
            for each, gap in zip(block.columns, gaps, strict=True):
                shown.add_column(Text(gap + plain(each.head)), justify="left" if each.is_text else "right",
                                 min_width=each.least if console.width >= WIDTH else None,
                                 overflow="fold")  # fmt: skip
            for row in block.rows:
                shown.add_row(*(Text(gap + plain(cell)) for gap, cell in zip(gaps, row, strict=True)))
            console.print(Padding(shown, (0, 0, 0, block.indent), expand=False))


WIDTH = 80
"""The width that tables have at most, unless a cell is longer."""
