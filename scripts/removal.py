"""Remove from a source what names a deleted room: whole statements, and lines of tables.

What names a room: an import of its modules, a text that is the name of one ("kvarts.audit.ledger"), a use of a module
of `kvarts.cli` that was deleted with it, and the bare name of such a module on a line of its own in a table. Where that
is all that a statement says, or it cannot be told apart from the rest, the statement goes as a whole; a block left
with nothing goes with its header. What cannot be removed so is a CannotRemoveError: the source is to be written
otherwise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["CannotRemoveError", "Gone", "imports_gone", "without", "without_listed"]

_COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)


class CannotRemoveError(Exception):
    """A line names a deleted room together with something that stays."""


@dataclass(frozen=True)
class Gone:
    """What is deleted: packages and modules by their whole names, the same of `kvarts.cli` by their bare names."""

    modules: tuple[str, ...]
    commands: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    """Names of the front door whose home is gone."""

    def has(self, module: str) -> bool:
        """Return whether `module` is deleted, itself or what it is in."""
        if any(module == gone or module.startswith(f"{gone}.") for gone in self.modules):
            return True
        package, _, name = module.rpartition(".")
        return package == "kvarts.cli" and name in self.commands

    def imported_by(self, node: ast.Import | ast.ImportFrom) -> list[ast.alias]:
        """Return what `node` imports that is deleted."""
        if isinstance(node, ast.Import):
            return [alias for alias in node.names if self.has(alias.name)]
        if node.module is None or node.level:
            return []
        if self.has(node.module):
            return list(node.names)
        return [
            alias
            for alias in node.names
            if self.has(f"{node.module}.{alias.name}") or (node.module == "kvarts" and alias.name in self.names)
        ]


def imports_gone(source: str, gone: Gone) -> bool:
    """Return whether a module imports anything that is deleted, or takes it from the front door."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and gone.imported_by(node):
            return True
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "kvarts"
            and node.attr in gone.names
        ):
            return True
    return False


def without(source: str, gone: Gone, *, path: str = "<source>") -> str:
    """Return `source` without what names a deleted room. Raise CannotRemoveError where that is not possible."""
    removal = _Removal(source, gone, path)
    tree = ast.parse(source)
    if removal.block(tree.body):
        raise CannotRemoveError(f"{path}: nothing would be left")
    lines = [line for number, line in enumerate(removal.lines, 1) if number not in removal.removed]
    result = b"".join(lines).decode()
    try:
        ast.parse(result)
    except SyntaxError as error:
        raise CannotRemoveError(f"{path}: what is left is no Python: {error}") from error
    return result


def without_listed(settings: str, gone: Gone) -> str:
    """Return TOML without the lines of its lists that are the name of a deleted module."""

    def stays(line: str) -> bool:
        listed = re.fullmatch(r'\s*"([\w.]+)",?\s*', line)
        return listed is None or not gone.has(listed[1])

    return "".join(filter(stays, settings.splitlines(keepends=True)))


class _Removal:
    """The lines of one source that go."""

    def __init__(self, source: str, gone: Gone, path: str) -> None:
        self.lines = source.encode().splitlines(keepends=True)
        self.removed: set[int] = set()
        self._gone = gone
        self._path = path
        self._bound = frozenset(
            alias.asname or alias.name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom) and node.module == "kvarts.cli"
            for alias in gone.imported_by(node)
        )

    def block(self, statements: Sequence[ast.stmt]) -> bool:
        """Remove from a block; return whether nothing is left of it."""
        gone = [self._statement(statement) for statement in statements]
        return bool(gone) and all(gone)

    def _statement(self, statement: ast.stmt) -> bool:
        """Remove from one statement; return whether it is gone as a whole."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._import(statement)
        if isinstance(statement, _COMPOUND):
            return self._compound(statement)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return False  # a docstring may speak of a room
        return self._simple(statement)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> bool:
        gone = self._gone.imported_by(statement)
        if len(gone) == len(statement.names):
            self._remove(statement)
            return True
        for alias in gone:
            if not self._is_on_own_lines(alias):
                raise self._cannot(alias, "imports what is deleted and what is not")
            self._remove(alias)
        return False

    def _compound(self, statement: ast.stmt) -> bool:
        blocks = list(_blocks(statement))
        inside = {id(node) for block in blocks for part in block for node in ast.walk(part)}
        decorators = getattr(statement, "decorator_list", [])
        for decorator in decorators:
            inside |= {id(node) for node in ast.walk(decorator)}
            if any(self._names(node) for node in ast.walk(decorator)):
                self._remove(decorator)
        for node in ast.walk(statement):
            if id(node) not in inside and self._names(node):
                raise self._cannot(node, "names what is deleted in the head of a block")
        empty = [self.block(block) for block in blocks]
        if empty and all(empty):
            self._remove(statement)
            for decorator in decorators:
                self._remove(decorator)
            return True
        if any(empty):
            raise self._cannot(statement, "loses one block and keeps another")
        return False

    def _simple(self, statement: ast.stmt) -> bool:
        """Remove lines of tables; the whole statement where it names what is deleted outside of them."""
        rows = [row for node in ast.walk(statement) for row in _rows(node) if self._is_row(row)]
        cut = [row for row in rows if any(self._names_in_table(node) for node in row)]
        spans = [_span(*row) for row in cut]
        for node in ast.walk(statement):
            if not self._names(node):
                continue
            if any(first <= node.lineno <= last for first, last in spans):  # type: ignore[attr-defined]
                continue
            around = [row for row in rows if node in {part for value in row for part in ast.walk(value)}]
            if not around:
                self._remove(statement)
                return True
            spans.append(_span(*min(around, key=lambda row: _length(*row))))
        for first, last in spans:
            self.removed.update(range(first, last + 1))
        return False

    def _names(self, node: ast.AST) -> bool:
        """Return whether `node` names what is deleted, wherever it is."""
        if isinstance(node, ast.Name):
            return node.id in self._bound
        if isinstance(node, ast.Import | ast.ImportFrom):
            return bool(self._gone.imported_by(node))
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and self._gone.has(node.value)

    def _names_in_table(self, node: ast.AST) -> bool:
        """Return whether `node`, itself a value or a key of a table, names what is deleted."""
        return self._names(node) or (isinstance(node, ast.Constant) and node.value in self._gone.commands)

    def _is_row(self, row: tuple[ast.expr, ...]) -> bool:
        return self._is_on_own_lines(*row)

    def _is_on_own_lines(self, *nodes: ast.expr | ast.alias) -> bool:
        """Return whether nothing else is on the lines of `nodes`, which are one item."""
        first, last = nodes[0], nodes[-1]
        assert last.end_lineno is not None
        before = self.lines[first.lineno - 1][: first.col_offset]
        after = self.lines[last.end_lineno - 1][last.end_col_offset :].strip().removeprefix(b",").strip()
        return not before.strip() and (not after or after.startswith(b"#"))

    def _remove(self, *nodes: ast.stmt | ast.expr | ast.alias) -> None:
        first, last = _span(*nodes)
        self.removed.update(range(first, last + 1))

    def _cannot(self, node: ast.AST, what: str) -> CannotRemoveError:
        number = getattr(node, "lineno", 0)
        return CannotRemoveError(f"{self._path}:{number}: {what}: {self.lines[number - 1].decode().strip()}")


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a compound statement that have anything in them."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, [])
        if block:
            yield block
    for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield part.body


def _rows(node: ast.AST) -> Iterable[tuple[ast.expr, ...]]:
    """Return the items of a table; none if `node` is no table."""
    if isinstance(node, ast.Dict):
        return [(value,) if key is None else (key, value) for key, value in zip(node.keys, node.values, strict=True)]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [(item,) for item in node.elts]
    return []


def _span(*nodes: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
    last = nodes[-1].end_lineno
    assert last is not None
    return nodes[0].lineno, last


def _length(*nodes: ast.expr) -> int:
    first, last = _span(*nodes)
    return last - first
