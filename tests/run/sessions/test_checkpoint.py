"""Checkpoints: what is loaded is what was saved, and everything else is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvarts.base.errors import ConfigError, OutputError
from kvarts.run.sessions.checkpoints import (
    ALIGNMENT,
    Checkpoint,
    CheckpointHeader,
    Checkpoints,
    Refused,
    decode_checkpoint,
    encode_checkpoint,
    token_digest,
)

SESSION, OTHER = "0" * 31 + "1", "0" * 31 + "2"
FINGERPRINT = {"weights": "abc", "dtype": "bfloat16", "sink": "4"}
TOKENS = list(range(10, 30))


def header_of(num_tokens: int = 12, session_id: str = SESSION, **changes: Any) -> CheckpointHeader:
    return CheckpointHeader(
        session_id=session_id,
        fingerprint={**FINGERPRINT, **changes},
        num_tokens=num_tokens,
        token_digest=token_digest(TOKENS[:num_tokens]),
        tables=((5, 3, 1),),
    )


def kv(seed: int = 0, size: int = 40) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        "k": rng.integers(0, 2**16, (2, size), dtype=np.uint16),
        "v": rng.random((2, size // 4, 2), dtype=np.float32),
    }


def assert_same(found: Checkpoint | Refused | None, header: CheckpointHeader, arrays: dict[str, Any]) -> None:
    assert isinstance(found, Checkpoint)
    assert found.header == header
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].shape == array.shape
        np.testing.assert_array_equal(found.arrays[name], array)


def reason(found: Checkpoint | Refused | None) -> str:
    assert isinstance(found, Refused)
    return found.reason


ARRAYS = st.dictionaries(
    st.text(max_size=5),
    hnp.arrays(
        st.sampled_from([np.uint8, np.uint16, np.float16, np.float32, np.int64, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
        elements={"allow_nan": False},
    ),
    max_size=4,
)


@pytest.mark.laws
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=ARRAYS, num_tokens=st.integers(0, len(TOKENS)))
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, arrays: dict[str, npt.NDArray[Any]], num_tokens: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    header = header_of(num_tokens)
    assert checkpoints.save(header, arrays) is None
    assert_same(checkpoints.load(SESSION, FINGERPRINT, TOKENS), header, arrays)


def test_arrays_of_any_layout_are_saved_and_come_back_to_be_written_to(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    whole = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    arrays = {"a": whole.T, "b": whole[:, ::2], "c": whole.astype(">i4")}
    checkpoints.save(header_of(), arrays)
    found = checkpoints.load(SESSION, FINGERPRINT, TOKENS)
    assert_same(found, header_of(), {**arrays, "c": whole.astype("<i4")})
    assert isinstance(found, Checkpoint)
    for array in found.arrays.values():
        assert array.flags.writeable
        assert array.ctypes.data % min(ALIGNMENT, 16) == 0


def test_every_flipped_byte_is_refused() -> None:
    data = np.frombuffer(b"".join(encode_checkpoint(header_of(), kv())), dtype=np.uint8)
    assert not isinstance(decode_checkpoint(data.copy()), str)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = data.copy()
            damaged[at] ^= flip
            found = decode_checkpoint(damaged)
            assert isinstance(found, str), at
            assert found.startswith(("is damaged: its checksum", "is no checkpoint of this version"))


def test_every_truncation_and_every_addition_is_refused() -> None:
    data = np.frombuffer(b"".join(encode_checkpoint(header_of(), kv())), dtype=np.uint8)
    for length in range(len(data)):
        assert isinstance(decode_checkpoint(data[:length].copy()), str)
    for more in (1, 4, 64):
        assert isinstance(decode_checkpoint(np.append(data, np.zeros(more, np.uint8))), str)


@settings(max_examples=30)
@given(text=st.binary(max_size=80))
def test_a_sound_checksum_over_nonsense_is_refused(text: bytes) -> None:
    from zlib import crc32

    from kvarts.run.sessions.checkpoints import HEAD, MAGIC, TAIL

    data = HEAD.pack(MAGIC, len(text)) + text
    data += TAIL.pack(crc32(data))
    assert isinstance(decode_checkpoint(np.frombuffer(data, dtype=np.uint8).copy()), str)


def test_no_file_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).load(SESSION, FINGERPRINT, TOKENS) is None


def test_a_damaged_file_is_named_and_not_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(header_of(), kv())
    path = tmp_path / f"{SESSION}.kv"
    path.write_bytes(path.read_bytes()[:-100])
    assert reason(checkpoints.load(SESSION, FINGERPRINT, TOKENS)) == f"{path} is damaged: its checksum is another"
    path.write_bytes(b"")
    assert reason(checkpoints.load(SESSION, FINGERPRINT, TOKENS)) == f"{path} is empty"
    path.write_bytes(b"kvarts kv 2\n" + bytes(100))
    assert "no checkpoint of this version" in reason(checkpoints.load(SESSION, FINGERPRINT, TOKENS))
    path.unlink()
    path.mkdir()
    assert "cannot be read" in reason(checkpoints.load(SESSION, FINGERPRINT, TOKENS))


@pytest.mark.parametrize(
    ("fingerprint", "expected"),
    [
        ({**FINGERPRINT, "dtype": "float32"}, "is of another dtype: bfloat16, here float32"),
        ({**FINGERPRINT, "rope": "yarn"}, "is of another rope: not given, here yarn"),
        ({"weights": "abc", "dtype": "bfloat16"}, "is of another sink: 4, here not given"),
        ({"weights": "x", "dtype": "y", "sink": "4"}, "is of another dtype: bfloat16, here y, and other weights"),
    ],
)
def test_another_fingerprint_is_refused_by_name(tmp_path: Path, fingerprint: dict[str, str], expected: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(header_of(), kv())
    assert reason(checkpoints.load(SESSION, fingerprint, TOKENS)).endswith(expected)


def test_a_file_of_another_session_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(header_of(), kv())
    (tmp_path / f"{SESSION}.kv").rename(tmp_path / f"{OTHER}.kv")
    assert reason(checkpoints.load(OTHER, FINGERPRINT, TOKENS)).endswith(f"is of session {SESSION}")


def test_kv_of_other_tokens_is_refused(tmp_path: Path) -> None:
    """A history that was rolled back and went on otherwise, and is as long as before."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(header_of(num_tokens=12), kv())
    other = [*TOKENS[:11], 99, *TOKENS[12:]]
    assert "of other tokens than the first 12" in reason(checkpoints.load(SESSION, FINGERPRINT, other))
    assert "KV of 12 tokens, and the history has 11" in reason(checkpoints.load(SESSION, FINGERPRINT, TOKENS[:11]))
    assert_same(checkpoints.load(SESSION, FINGERPRINT, np.array(TOKENS[:12])), header_of(num_tokens=12), kv())


def test_the_last_file_of_a_session_is_removed_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save(header_of(), kv(seed=1)) is None
    assert checkpoints.save(header_of(), kv(size=80)) is None
    assert checkpoints.remove(SESSION)
    assert not checkpoints.remove(SESSION)


def test_a_disk_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "kv")
    (tmp_path / "kv" / f"{SESSION}.kv").mkdir()
    assert "cannot be written" in reason(checkpoints.save(header_of(), kv()))
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [f"{SESSION}.kv"]


def test_what_has_no_plain_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"k: has the dtype object, which cannot be stored\. View bfloat16 as uint16"):
        Checkpoints(tmp_path).save(header_of(), {"k": np.array([None])})
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot hold checkpoints"):
        Checkpoints(tmp_path / "file")


def test_unknown_and_unfinished_files_are_swept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for session_id in (SESSION, OTHER):
        checkpoints.save(header_of(session_id=session_id), kv())
    (tmp_path / f".{SESSION}.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    assert [path.name for path in checkpoints.sweep([SESSION])] == [f".{SESSION}.tmp", f"{OTHER}.kv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{SESSION}.kv", "notes.txt"]
    assert checkpoints.sweep([SESSION]) == []


def test_an_unfinished_file_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(header_of(), kv(seed=1))
    (tmp_path / f".{SESSION}.tmp").write_bytes(b"half of a new one")
    assert_same(Checkpoints(tmp_path).load(SESSION, FINGERPRINT, TOKENS), header_of(), kv(seed=1))
