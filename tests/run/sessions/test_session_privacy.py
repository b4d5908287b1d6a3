"""What sessions leave on disk is for their user alone, and nothing that another user laid there is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvarts.base.errors import OutputError
from kvarts.run.sessions.checkpoints import CheckpointHeader, Checkpoints, Refused, token_digest
from kvarts.run.sessions.history import FILE_NAME, Histories
from kvarts.run.sessions.values import SessionSettings, StoredSession, Usage

SESSION = "0" * 31 + "1"
TOKENS = [1, 2, 3]


@contextmanager
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_state(directory: Path) -> None:
    with Histories(directory) as histories:
        stored = StoredSession(
            session_id=SESSION, owner="ann", settings=SessionSettings(), created_s=1.0, usage=Usage(last_used_s=1.0),
            length=0,
        )  # fmt: skip
        histories.create(stored).result()
        histories.append(SESSION, 0, TOKENS).result()
        check_files(directory)
    assert save(Checkpoints(directory / "kv")) is None


def header() -> CheckpointHeader:
    return CheckpointHeader(
        session_id=SESSION, fingerprint={"a": "b"}, num_tokens=3, token_digest=token_digest(TOKENS), tables=()
    )


def save(checkpoints: Checkpoints) -> Any:
    return checkpoints.save(header(), {"k": np.arange(5)})


def check_files(directory: Path) -> None:
    """Every file is 0600, and every directory 0700."""
    assert mode_of(directory) == 0o700
    for path in directory.rglob("*"):
        assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path


def test_directories_are_0700_and_files_0600_whatever_the_umask(tmp_path: Path) -> None:
    with generous_umask():
        write_state(tmp_path / "above" / "state")
    check_files(tmp_path / "above" / "state")


def test_a_directory_of_an_earlier_version_is_closed_to_others(tmp_path: Path) -> None:
    state = tmp_path / "state"
    write_state(state)
    for path in (state, *state.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with Histories(state) as histories:
        assert histories.tokens(SESSION).result().tolist() == TOKENS
        checkpoints = Checkpoints(state / "kv")
        assert not isinstance(checkpoints.load(SESSION, {"a": "b"}, TOKENS), Refused)
        check_files(state)


def test_a_directory_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    state = tmp_path / "shared"
    state.mkdir()
    state.chmod(0o755)
    (state / "notes.txt").write_text("of others")
    with Histories(state):
        assert mode_of(state) == 0o755
        assert mode_of(state / FILE_NAME) == 0o600


def test_links_that_another_user_laid_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    state = tmp_path / "state"
    (state / "kv").mkdir(parents=True)
    checkpoints = Checkpoints(state / "kv")
    for name in (f".{SESSION}.tmp", f"{SESSION}.kv"):
        (state / "kv" / name).symlink_to(target)
    loaded = checkpoints.load(SESSION, {"a": "b"}, TOKENS)
    assert isinstance(loaded, Refused) and "cannot be read" in loaded.reason
    assert save(checkpoints) is None  # both names are files now, and the links are gone
    assert not (state / "kv" / f"{SESSION}.kv").is_symlink()
    assert target.read_bytes() == b"precious"
    (state / FILE_NAME).symlink_to(target)
    with pytest.raises(OutputError, match="cannot be opened"):
        Histories(state)
    (state / FILE_NAME).unlink()
    os.link(target, state / FILE_NAME)
    with pytest.raises(OutputError, match="not a file of this user alone"):
        Histories(state)
    assert target.read_bytes() == b"precious"


def test_a_pipe_in_place_of_a_checkpoint_blocks_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "kv")
    os.mkfifo(tmp_path / "kv" / f"{SESSION}.kv")
    assert isinstance(checkpoints.load(SESSION, {"a": "b"}, TOKENS), Refused)
