"""What is read of a journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarts.base.errors import InputError, MissingFileError
from kvarts.proof.explain.reading import Journal, load_journal


def loaded(text: bytes, folder: Path) -> Journal:
    path = folder / "events.jsonl"
    path.write_bytes(text)
    return load_journal(path)


def test_a_journal_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    text = b"".join(
        [
            b'{"kvarts_journal":1,"block_size_tokens":4,"total_blocks":9}\n',
            b'{"event":"rejected","n":0,"step":-1,"t_ms":0.0,"request":0,"request_id":"a","reason":"too long"}\n',
            b'{"event":"rejected","n":1,"step":-1,"t_ms":0.0,"request":1,"requ',
        ]
    )
    assert len(loaded(text, tmp_path).lines) == 1


HEAD = b'{"kvarts_journal":1,"block_size_tokens":4,"total_blocks":9}\n'
ARRIVED = (
    b'{"event":"arrived","n":%d,"step":-1,"t_ms":0,"request":%d,"request_id":"a","prompt_tokens":2,"output_tokens":9,'
    b'"num_ahead":0,"unit_tokens":1,"num_known_tokens":2,"units":[1,2]}\n'
)
DRAFTED = (
    HEAD
    + ARRIVED % (0, 0)
    + ARRIVED % (1, 1)
    + b'{"event":"admitted","n":2,"step":0,"t_ms":0,"request":0,"hit_pages":0}\n'
    + b'{"event":"drafted","n":3,"step":1,"t_ms":0,"request":%d,"drafted":%d,"accepted":%d}\n'
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "is empty"),
        (b"{}\n", "events.jsonl:1: is no event of a journal"),
        (b'{"kvarts_journal":2,"block_size_tokens":4,"total_blocks":9}\n', "is a journal of version 2"),
        (HEAD + b"oops\n", "events.jsonl:2: is no event of a journal"),
        (HEAD + b'{"event":"admitted","n":0,"step":0,"t_ms":0,"request":5,"hit_pages":0}\n', "which never arrived"),
        (
            HEAD + b'{"event":"rejected","n":1,"step":0,"t_ms":0,"request":5,"request_id":"a","reason":"b"}\n',
            "some are lost",
        ),
        (DRAFTED % (0, 2, 3), "accepts more tokens than were drafted"),
        (DRAFTED % (1, 1, 1), "drafts for request 1, which was never admitted"),
        (b"\x1f\x8b\x00\x00", "is no readable gzip"),
    ],
)
def test_what_is_no_journal_is_a_clear_error(tmp_path: Path, text: bytes, what: str) -> None:
    with pytest.raises(InputError, match=what):
        loaded(text, tmp_path)


def test_a_missing_journal_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="kvarts replay --events"):
        load_journal(tmp_path / "nothing.jsonl")
