"""What only one module does: everything that it guarantees holds everywhere, also for code that is added."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "kvarts"

WRITES = {
    "base/files.py": "the one way",
    "base/growing.py": "the one way, of files that grow",
    "base/leftovers.py": "the one way, of files that killed processes leave",
    "cli/sharing.py": "folders in a new directory",
    "doors/vllm/page_io.py": "memory that processes share",
    "doors/vllm_front/front_end.py": "the folder and the log of another process",
}
CALLS = {
    *("write_bytes", "mkdir", "makedirs", "rename", "fsync", "ftruncate", "mkstemp", "mkdtemp", "symlink_to"),
    *("TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile", "copyfile", "copytree"),
}
"""Functions and methods that create, change or rename files, next to `open` and `fdopen` in a mode that does."""


def is_write(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    if name not in ("open", "fdopen"):
        return name in CALLS
    given = [*node.args, *(each.value for each in node.keywords)]
    texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return any(re.fullmatch("[rwxab+t]{1,3}", text) and set(text) & set("wxa+") for text in texts)


def test_texts_become_numbers_in_one_place() -> None:
    """`whole_number` has the bounds of a number in a text: Python converts no longer ones, and raises."""
    found = {path for path in SOURCE.rglob("*.py") if re.search(r"\.is(decimal|digit|numeric)\(", path.read_text())}
    assert {path.relative_to(SOURCE).as_posix() for path in found} == {"base/limits.py"}


def test_files_are_written_in_one_place() -> None:
    words = re.compile(rf"\b({'|'.join(CALLS)})\(|open\(.*[\"'][rwxab+t]+[\"']")
    paths = [path for path in SOURCE.rglob("*.py") if words.search(path.read_text())]
    found = {path for path in paths if any(map(is_write, ast.walk(ast.parse(path.read_text()))))}
    assert {path.relative_to(SOURCE).as_posix() for path in found} == set(WRITES)


def test_what_a_decoder_raises_is_caught_whole_and_told_in_one_way() -> None:
    """A text that is nested too deeply is no other error than one that is no JSON, and msgspec's words are not ours.

    `UNDECODED` is all that a decoder raises; `problem_of` and `parts_of` return its problem in bounded words.
    """
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if name.startswith("proof/verify/") or not re.search(r"except .*(msgspec|UNDECODED)", text):
            continue  # the verifier shares no code with what it verifies
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Try):
                types = " ".join(ast.unparse(each.type) for each in node.handlers if each.type is not None)
                body = " ".join(map(ast.unparse, node.body))
                if "msgspec." in types and ".decode(" in body and not re.search("UNDECODED|RecursionError", types):
                    found.append(f"{name}:{node.lineno} catches {types}")
                found += [f"{name}:{line} tells msgspec's words" for each in node.handlers for line in told_raw(each)]
    assert [re.sub(r":\d+", "", each) for each in found] == CAUGHT_OUTSIDE


CAUGHT_OUTSIDE = [
    "cost/hardware/model_config.py catches msgspec.DecodeError",
    "sim/traffic/claude_code.py catches msgspec.ValidationError",
]
"""A `try` around them catches the rest."""


def told_raw(handler: ast.ExceptHandler) -> list[int]:
    """Lines of a handler of msgspec's errors in which the error itself becomes text."""
    types = "" if handler.type is None else ast.unparse(handler.type)
    if handler.name is None or not re.search("msgspec|UNDECODED", types):
        return []
    texts = [node.value for node in ast.walk(handler) if isinstance(node, ast.FormattedValue)]
    calls = [node for node in ast.walk(handler) if isinstance(node, ast.Call) and ast.unparse(node.func) == "str"]
    texts += [node.args[0] for node in calls if node.args]
    return [node.lineno for node in texts if isinstance(node, ast.Name) and node.id == handler.name]
