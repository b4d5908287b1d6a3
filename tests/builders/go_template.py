"""A renderer of the part of Helm's templates that the chart uses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)


class FailedError(Exception):
    """The template calls `fail`."""


class Chart:
    """The templates of a chart. `to_yaml` and `root`: its function, and `$`."""

    def __init__(self, folder: Path, root: Mapping[str, Any], to_yaml: Callable[[Any], str]) -> None:
        self._root = root
        self._to_yaml = to_yaml
        self._defined: dict[str, list[Any]] = {}
        self._files = {path.name: self._parse(_pieces(path.read_text())) for path in sorted(folder.iterdir())}

    def render(self, name: str) -> str:
        """The text of one file."""
        return self._write(self._files[name], self._root)

    def _parse(self, pieces: list[str | tuple[str]], *, is_block: bool = False) -> list[Any]:
        """Consumes pieces until the end of a block."""
        nodes: list[Any] = []
        while pieces:
            piece = pieces.pop(0)
            if isinstance(piece, str):
                nodes.append(piece)
                continue
            (action,) = piece
            word, _, rest = action.partition(" ")
            if word in ("if", "range"):
                body = self._parse(pieces, is_block=True)
                nodes.append(
                    (word, rest, body, self._parse(pieces, is_block=True) if body and body[-1] == ELSE else [])
                )
            elif word == "define":
                self._defined[shlex.split(rest)[0]] = self._parse(pieces, is_block=True)
            elif word in ("else", "end"):
                assert is_block
                return [*nodes, ELSE] if word == "else" else nodes
            else:
                nodes.append((None, action))
        assert not is_block, "a block does not end"
        return nodes

    def _write(self, nodes: list[Any], dot: Any) -> str:
        told = ""
        for node in nodes:
            if isinstance(node, str):
                told += node
            elif node == ELSE:
                break
            elif node[0] is None:
                value = self._pipe(node[1], dot)
                told += "" if value is None else str(value)
            elif node[0] == "if":
                told += self._write(node[2] if self._pipe(node[1], dot) else node[3], dot)
            else:
                told += "".join(self._write(node[2], each) for each in self._pipe(node[1], dot))
        return told

    def _pipe(self, text: str, dot: Any) -> Any:
        value: list[Any] = []
        for stage in text.split(" | "):
            tokens = re.findall(r"\"[^\"]*\"|[()]|[^\s()]+", stage)
            value = [self._call(tokens, dot, value)]
            assert not tokens
        return value[0]

    def _call(self, tokens: list[str], dot: Any, piped: list[Any]) -> Any:
        args: list[Any] = []
        name = tokens.pop(0) if re.fullmatch(r"[a-zA-Z]+", tokens[0]) else ""
        while tokens and tokens[0] != ")":
            token = tokens.pop(0)
            if token == "(":
                args.append(self._call(tokens, dot, []))
                assert tokens.pop(0) == ")"
            else:
                args.append(self._value(token, dot))
        args += piped
        functions: dict[str, Callable[..., Any]] = {
            "": lambda value: value,
            "add": lambda *values: sum(values),
            "and": lambda *values: next((value for value in values if not value), values[-1]),
            "or": lambda *values: next((value for value in values if value), values[-1]),
            "not": lambda value: not value,
            "default": lambda other, value: value or other,
            "dict": lambda *values: dict(zip(values[::2], values[1::2], strict=True)),
            "include": lambda name, value: self._write(self._defined[name], value),
            "nindent": lambda count, text: "\n" + "\n".join(" " * count + line for line in text.strip().split("\n")),
            "toYaml": self._to_yaml,
            "fail": _fail,
        }
        return functions[name](*args)

    def _value(self, token: str, dot: Any) -> Any:
        if token[0] == '"':
            return token.strip('"')
        if token.isdecimal():
            return int(token)
        value = self._root if token[0] == "$" else dot
        for name in filter(None, token.lstrip("$").split(".")):
            value = value[name]
        return value


ELSE = ("else",)


def _fail(text: str) -> None:
    raise FailedError(text)


def _pieces(text: str) -> list[str | tuple[str]]:
    """Texts, and actions as tuples; with their spaces trimmed as Go does."""
    pieces: list[str | tuple[str]] = []
    place, trims = 0, False
    for match in ACTION.finditer(text):
        before = text[place : match.start()]
        before = before.lstrip() if trims else before
        pieces += [before.rstrip() if match[1] else before, (match[2],)]
        place, trims = match.end(), bool(match[3])
    return [*pieces, text[place:].lstrip() if trims else text[place:]]
