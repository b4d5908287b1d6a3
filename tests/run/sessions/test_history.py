"""Histories on disk: what survives, what is refused, and what is said of files that cannot be read."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvarts.base.errors import ConfigError, InputError, OutputError
from kvarts.run.sessions.history import FILE_NAME, Histories
from kvarts.run.sessions.history_file import APPLICATION_ID, SCHEMA_VERSION, SEGMENT_TOKENS
from kvarts.run.sessions.values import SessionNotReadyError, SessionValueError, UnknownSessionError

from builders import histories as builder
from builders.histories import history_after, stored

NUM_SESSIONS = 16


def kill_and_compare(directory: Path, kills: int, seed: int) -> None:
    random = Random(seed)
    counts = [0] * NUM_SESSIONS
    for _ in range(kills):
        command = [sys.executable, builder.__file__, str(directory), str(seed), json.dumps(counts)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            acknowledged = [child.stdout.readline()]
            time.sleep(random.random() * 0.15)
            child.kill()
            acknowledged += child.stdout.read().splitlines(keepends=True)
        for line in acknowledged:
            if line.endswith(b"\n"):
                number, count = map(int, line.split())
                assert count == counts[number] + 1
                counts[number] = count
        with Histories(directory) as histories:
            sessions = {int(session.session_id, 16): session for session in histories.load()}
            for number, count in enumerate(counts):
                if number not in sessions:
                    assert count == 0
                    continue
                found = histories.tokens(f"{number:032x}").result().tolist()
                if found != history_after(seed, number, count):
                    # The operation that was under way may have reached the disk, whole.
                    assert found == history_after(seed, number, count + 1)
                    counts[number] = count + 1
    assert sum(counts) > kills


@pytest.mark.parametrize("kills", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, kills: int) -> None:
    kill_and_compare(tmp_path, kills, seed=1)


@pytest.mark.long
def test_what_was_acknowledged_survives_a_hundred_kills(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, kills=100, seed=2)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, builder.__file__, str(tmp_path), "0", "[0]"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        with pytest.raises(ConfigError, match=r"history\.sqlite3: is in use by another process\. Stop that process"):
            Histories(tmp_path)
        child.kill()
        child.stdout.read()
    with Histories(tmp_path) as histories:
        assert [session.session_id for session in histories.load()] == [f"{0:032x}"]


def test_a_second_one_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with Histories(tmp_path), pytest.raises(ConfigError, match="in use"):
        Histories(tmp_path)


def test_an_append_that_is_tried_again_is_not_doubled(tmp_path: Path) -> None:
    with Histories(tmp_path) as histories:
        histories.create(stored(1)).result()
        session_id = stored(1).session_id
        assert histories.append(session_id, 0, [1, 2, 3]).result() == 3
        with pytest.raises(SessionNotReadyError, match="has 3 tokens, not 0"):
            histories.append(session_id, 0, [1, 2, 3]).result()
        assert histories.tokens(session_id).result().tolist() == [1, 2, 3]


def test_a_fork_outlives_its_parent(tmp_path: Path) -> None:
    with Histories(tmp_path) as histories:
        histories.create(stored(1)).result()
        histories.append(stored(1).session_id, 0, range(1000)).result()
        histories.fork(stored(1).session_id, stored(2, length=700)).result()
        assert histories.end(stored(1).session_id, "closed", 5.0).result() == 1000
    with Histories(tmp_path) as histories:
        assert histories.tokens(stored(2).session_id).result().tolist() == list(range(700))
        assert histories.load()[0].parent == stored(1).session_id


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], ["a"], [[1]], [2**70], [None]])
def test_what_is_no_token_id_is_refused(tmp_path: Path, tokens: list[int]) -> None:
    with Histories(tmp_path) as histories:
        histories.create(stored(1)).result()
        with pytest.raises(SessionValueError):
            histories.append(stored(1).session_id, 0, tokens).result()
        assert histories.load()[0].length == 0


def test_arrays_of_any_integers_are_tokens(tmp_path: Path) -> None:
    with Histories(tmp_path) as histories:
        histories.create(stored(1)).result()
        for length, kind in enumerate(("i8", ">u4", "u1")):
            histories.append(stored(1).session_id, length, np.array([7], dtype=kind)).result()
        assert histories.tokens(stored(1).session_id).result().tolist() == [7, 7, 7]


def test_what_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    histories = Histories(tmp_path)
    waiting = [histories.create(stored(number)) for number in range(50)]
    histories.close()
    histories.close()
    assert all(future.result() is None for future in waiting)
    with pytest.raises(ConfigError, match="closed"):
        histories.create(stored(51)).result()


def test_unknown_sessions_have_no_tokens(tmp_path: Path) -> None:
    with Histories(tmp_path) as histories, pytest.raises(UnknownSessionError, match="no session of this id"):
        histories.tokens("0" * 32).result()


def test_a_growing_history_has_no_more_rows_than_another(tmp_path: Path) -> None:
    with Histories(tmp_path) as histories:
        histories.create(stored(1)).result()
        for length in range(3 * SEGMENT_TOKENS):
            histories.append(stored(1).session_id, length, [length])
        histories.tokens(stored(1).session_id).result()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("SELECT count(*) FROM segments").fetchone() == (3,)
    connection.close()


# Files that cannot be read -----------------------------------------------------------------------------------


def changed(directory: Path, *statements: str) -> None:
    connection = sqlite3.connect(directory / FILE_NAME, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database at all, and long enough to be read as one" * 100)
    with pytest.raises(InputError, match=r"history\.sqlite3: is no database of session histories\. Move the file away"):
        Histories(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes().startswith(b"no database")


def test_a_database_of_another_program_is_named_and_left_alone(tmp_path: Path) -> None:
    changed(tmp_path, "CREATE TABLE theirs (x)")
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(InputError, match="of another program"):
        Histories(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_version_is_named(tmp_path: Path, version: int) -> None:
    changed(
        tmp_path, f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {version}", "CREATE TABLE a (b)"
    )
    with pytest.raises(InputError, match=rf"in version {version} of their form.* Use the kvarts that wrote it"):
        Histories(tmp_path)


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot hold sessions"):
        Histories(tmp_path / "file")
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(OutputError, match="cannot be opened"):
        Histories(tmp_path)


def with_a_history(directory: Path) -> str:
    with Histories(directory) as histories:
        histories.create(stored(1)).result()
        histories.append(stored(1).session_id, 0, range(5000)).result()
    return stored(1).session_id


def test_tokens_that_have_changed_are_named(tmp_path: Path) -> None:
    session_id = with_a_history(tmp_path)
    path = tmp_path / FILE_NAME
    data = path.read_bytes()
    at = data.index(np.arange(1024, 1030, dtype="<u4").tobytes())
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with Histories(tmp_path) as histories:
        with pytest.raises(InputError, match=rf"is damaged: tokens of session {session_id} from 1024 on have changed"):
            histories.tokens(session_id).result()
        assert histories.tokens(session_id, 0, 1024).result().tolist() == list(range(1024))


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM segments WHERE start = 256",
        "UPDATE segments SET tokens = x'00' WHERE start = 256",
        "DELETE FROM sessions",
        "UPDATE sessions SET settings = x'ff'",
        "UPDATE sessions SET usage = '{}'",
        "UPDATE sessions SET settings = CAST('{\"sink\":-1}' AS BLOB)",
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path: Path, damage: str) -> None:
    with_a_history(tmp_path)
    changed(tmp_path, damage)
    with Histories(tmp_path) as histories, pytest.raises(InputError, match="is damaged: "):
        histories.load()


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    with_a_history(tmp_path)
    path = tmp_path / FILE_NAME
    data = path.read_bytes()
    page = 4096
    refused = 0
    for at in range(page, len(data), page):
        path.write_bytes(data[:at] + bytes(page) + data[at + page :])
        try:
            with Histories(tmp_path) as histories:
                found = [histories.tokens(session.session_id).result().tolist() for session in histories.load()]
        except InputError as error:
            assert "is damaged" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert found == [list(range(5000))]
    assert refused >= 5


def test_a_full_disk_refuses_and_loses_nothing(tmp_path: Path) -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(builder.__file__).parents[1])!r})
from pathlib import Path
from kvarts.base.errors import OutputError
from kvarts.run.sessions.history import Histories
from builders.histories import stored
histories = Histories(Path({str(tmp_path)!r}))
histories.create(stored(1)).result()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
length = 0
try:
    while True:
        length = histories.append(stored(1).session_id, length, range(length, length + 5000)).result()
except OutputError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert histories.tokens(stored(1).session_id).result().tolist() == list(range(length)), length
length = histories.append(stored(1).session_id, length, range(length, length + 5000)).result()
histories.close()
print(length)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    error, length = done.stdout.splitlines()
    assert "history.sqlite3: cannot be read or written" in error
    with Histories(tmp_path) as histories:
        assert histories.tokens(stored(1).session_id).result().tolist() == list(range(int(length)))
