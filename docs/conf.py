"""Configuration of Sphinx for the documentation site, which scripts/docs_site.py builds."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

import kvarts
from kvarts.base.settings import settings_of

project = "kvarts"
author = "the authors of kvarts"
copyright = "the authors of kvarts, Apache-2.0"  # noqa: A001 - Sphinx's name
version = release = kvarts.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 4
smartquotes = False
suppress_warnings = ["misc.highlighting_failure"]  # JSON lines with "..." in them

html_theme = "furo"
html_title = f"kvarts {version}"
html_static_path = [str(Path(__file__).parent / "assets")]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"


def as_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring, plain text with code between backticks, as reStructuredText."""
    found = []
    for line in lines:
        pieces = re.split(r"(`[^`]+`)", line)
        quoted = [f"`{piece}`" if piece[:1] == "`" else re.sub(r"([*_|\\])", r"\\\1", piece) for piece in pieces]
        found.append("".join(quoted) if not line.startswith("    ") else line)
    return found


def on_docstring(app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Have autodoc read docstrings as they are written, and list the fields of settings with their help."""
    lines[:] = as_rst(lines)
    if what == "class" and issubclass(item, msgspec.Struct):
        helps = {field.field: field.help for field in settings_of(item) if field.help}
        lines += ["", *(line for key, text in helps.items() for line in as_rst([f"- `{key}`: {text}"])), ""]


def on_signature(
    app: Any, what: str, name: str, item: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Leave types out of the signatures of structs of settings: their fields are listed below."""
    if what == "class" and issubclass(item, msgspec.Struct) and settings_of(item):
        parameters = inspect.signature(item).parameters.values()
        bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
        return str(inspect.Signature(bare)), returned
    return signature, returned


def setup(app: Any) -> None:
    """Register the hooks."""
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("autodoc-process-signature", on_signature)
