"""Old names of modules."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from kvarts.moved import MOVED, MOVED_NAMES


def is_there(module: str) -> bool:
    """Whether the room of `module` is in this project."""
    return find_spec(".".join(module.split(".")[:2])) is not None


NEW = sorted({*MOVED.values(), *(new for names in MOVED_NAMES.values() for new in names)})


@pytest.mark.parametrize("new", [new for new in NEW if is_there(new) and ".torch" not in new and ".llm" not in new])
def test_every_new_name_is_a_module(new: str) -> None:
    import_module(new)


@pytest.mark.parametrize(
    ("old", "new", "spelled"),
    [
        (old, new, spelled)
        for old, modules in MOVED_NAMES.items()
        for new, names in modules.items()
        if is_there(new)
        for spelled in names
    ],
)
def test_a_name_of_a_module_that_was_split_is_found_and_warns(old: str, new: str, spelled: str) -> None:
    name, _, new_name = spelled.partition("=")
    new_name = new_name or name
    with pytest.warns(DeprecationWarning, match=rf"{old}\.{name} is now {new}\.{new_name}") as warned:
        found = getattr(import_module(old), name)
    assert {warning.filename for warning in warned} == {__file__}, "the warning is about the code that asks"
    assert found is getattr(import_module(new), new_name)


def test_a_module_that_was_split_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match=r"'kvarts\.timeline\.journal' has no attribute 'nothing'"):
        _ = import_module("kvarts.timeline.journal").nothing
