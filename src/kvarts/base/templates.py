"""Chat templates: jinja2 programs of others, rendered in a sandbox, with bounded products and output.

`Template` renders as Hugging Face's transformers do, and says which line of the template wrote which text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from kvarts.base.errors import ConfigError, first_line

__all__ = ["MAX_RENDERED_CHARS", "Template"]

MAX_POWER, MAX_INDENT = 1000, 16
MAX_RENDERED_CHARS = 32 * 1024 * 1024
"""Limit of the output of a template: as much as the body of a request may have."""
MARK = "\x00L%d\x00"
"""Stands before what a line of the template writes."""
_MARKS = re.compile(r"\x00L(\d+)\x00")
_GENERATION = re.compile(r"(?<=\{%)([-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
"""A tag of transformers for training, which writes nothing but what it encloses."""


class Template:
    """A chat template, compiled once. Raise ConfigError for one that does not compile, or without jinja2."""

    def __init__(self, source: str) -> None:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ConfigError("needs jinja2, which is not installed", hint="pip install jinja2.") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.intercepted_binops = frozenset(["*", "**"])
        self._calculate = environment.call_binop
        environment.call_binop = self._bounded
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _fixed_date
        self._environment = environment
        self._source = _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}", source)
        try:
            self._template = environment.from_string(self._source)
        except Exception as error:  # jinja2 raises several kinds, for syntax and for what is too deep
            line = getattr(error, "lineno", None)
            raise ConfigError(f"does not take these messages: {first_line(error)}", line=line) from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text for `values`: messages, tools, add_generation_prompt. Raise ConfigError if it fails."""
        return self._rendered(self._template, values)

    def lines_of(self, values: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Return where in the rendered text a line of the template begins to write: (place, line), by place.

        Empty for a template that changes what it captures, so that its text cannot be marked.
        """
        try:
            marked = self._rendered(self._marked, values)
        except ConfigError:
            return []
        places, num_marks = [], 0
        for found in _MARKS.finditer(marked):
            places.append((found.start() - num_marks, int(found[1])))
            num_marks += len(found[0])
        return places if _MARKS.sub("", marked) == self.render(values) else []

    @property
    def dated_line(self) -> int | None:
        """The line that writes the date of the day; None without one."""
        place = self._source.find("strftime_now")
        return None if place < 0 else self._source.count("\n", 0, place) + 1

    @cached_property
    def _marked(self) -> Any:
        from jinja2 import nodes

        tree = self._environment.parse(self._source)
        for output in tree.find_all(nodes.Output):
            output.nodes = [
                each
                for node in output.nodes
                for each in (nodes.TemplateData(MARK % node.lineno, lineno=node.lineno), node)
            ]
        return self._environment.from_string(tree)

    def _rendered(self, template: Any, values: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in template.generate(values):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise ValueError(f"it writes more than {MAX_RENDERED_CHARS:,} characters")
                parts.append(part)
        except Exception as error:  # templates may raise any exception
            raise ConfigError(f"the chat template does not take these messages: {error}") from error
        return "".join(parts)

    def _bounded(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the product or power of two values, if they are not too large."""
        sizes = [value if type(value) in (int, float) else len(value) for value in (left, right)]
        most = MAX_RENDERED_CHARS if operator == "*" else MAX_POWER
        if any(abs(size) > most for size in sizes) or abs(sizes[0] * sizes[1]) > MAX_RENDERED_CHARS:
            raise ValueError(f"{operator} of {sizes[0]} and {sizes[1]} is too much")
        return self._calculate(context, operator, left, right)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """Return JSON as transformers' templates write it: without escapes for HTML."""
    if isinstance(settings.get("indent"), int) and settings["indent"] > MAX_INDENT:
        raise ValueError(f"an indent of {settings['indent']} is too much")
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _refuse(message: str) -> str:
    raise ValueError(message)


def _fixed_date(form: str) -> str:
    """Return a date that does not depend on the day: what a template writes must be the same each time."""
    from datetime import datetime

    return datetime(2026, 1, 1).strftime(form)
