"""Destinations of a plan's charts: an HTML page, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvarts.cli.pages import check_opening, open_page
from kvarts.files import check_writable, is_standard_output, write_whole

__all__ = ["Pictures"]


class Pictures:
    """The files of charts, checked before anything is computed. Raises ConfigError and OutputError."""

    def __init__(self, html_file: Path | None, plot_files: tuple[Path, ...], *, opens: bool) -> None:
        check_opening(html_file, opens=opens)
        self._opens = opens
        self._html_file = html_file
        self._plot_files = plot_files
        self.paths = [*plot_files, *([html_file] if html_file is not None else [])]
        if plot_files:
            from kvarts.report.pictures import check_installed

            check_installed("--plot")
        for path in self.paths:
            check_writable(path)

    @property
    def are_printed(self) -> bool:
        """Whether one of the files is standard output; then nothing else is printed there."""
        return any(map(is_standard_output, self.paths))

    def write(self, values: dict[str, Any]) -> None:
        """Write all files."""
        if self._html_file is not None:
            from kvarts.plan.page import render_page

            write_whole(self._html_file, render_page(values))
            open_page(self._html_file, opens=self._opens)
        for path in self._plot_files:
            from kvarts.plan.pictures import draw

            write_whole(path, draw(values, "png" if path.suffix == ".png" else "svg"))
