"""Keys: what is a key, whose it is, and what a file of them may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.base.tenants import Keys, Owner, read_keys


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "a\n"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        Keys({key: Owner()})


def test_without_any_key_there_are_no_keys() -> None:
    with pytest.raises(ConfigError, match="no keys"):
        Keys({})


def test_a_key_stands_for_its_owner_alone() -> None:
    a, b = Owner(name="a"), Owner(name="b", share=2.0)
    keys = Keys({"one": a, "two": b, "three": b, "root": Owner(name="admin", is_admin=True)})
    assert [keys.find(key) for key in ("one", "two", "three", "on", "one ", "")] == [a, b, b, None, None, None]
    assert keys.shares == {"a": 1.0, "b": 2.0} and keys.has_several_owners
    assert not Keys({"one": a, "root": Owner(name="admin", is_admin=True)}).has_several_owners


def test_a_file_names_owners_and_their_shares(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\n\nk1\nk2 owner=b share=2.5\n  k3 owner=b priority\n")
    assert read_keys(path) == {
        "k1": Owner(),
        "k2": Owner(name="b", share=2.5),
        "k3": Owner(name="b", may_prioritize=True),
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", None),
        ("# nothing\n\n", None),
        ("a\na\n", 2),
        ("a share=0\n", 1),
        ("a share=much\n", 1),
        ("a share=nan\n", 1),
        ("ok\na colour=red\n", 2),
        ("ok\nschlüssel\n", 2),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_keys(path)
    assert refused.value.line == line and str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_keys(tmp_path / "keys")
