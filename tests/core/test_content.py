from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.keys import BlockKeys, root_key

# What vLLM 0.32.0 computes for tokens 100..111 in pages of 4, salted "tenant-a": the root key, then three pages;
# then the first page without a salt, and a page of the ids 151643, 2**31, 0, 70000.
VLLM_KEYS = {
    "sha256": (
        "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "1dd3f6782a31d031f5a27d5e64c4bd6412f8a2c9040534f0fad66c7789f78d46",
        "e955a01e9cbb9b0a1acaf8d78660f8776596ffc0da7fc28c747be8b99c174de6",
        "a680acfbc0015184a3bb59f5b6af54822e99e6d32c99c6a18dfaf28739c83887",
        "007f699eb7d4928d9961af00e454b36a0a0a4098a8d565689dc54be60c72d352",
        "0ef08f5785a4429fd257407e409fe956264a5b45d9a5db8d1bc2896240a72f1a",
    ),
    "sha256_cbor": (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "f223037d4fa58a8940f2e906aa50c2a2276b5c115ea56c19a96af4aa4010be26",
        "f64a31c5d14b424d2cd2338c1241d9dcbe6af3b02d685c3cf903137410899b4a",
        "61e70c906821108564829c395eb870f8805ac061f612d06b836da6542f877b15",
        "f6660814c0f5fab668e3a3e4cc9d7c843f32e254d6a433791cccfba573d0cf8a",
        "5818da805e394dcddde235efb13774b4c27eda18ed89af3a4fbda7406962fcc3",
    ),
}


def tokens(*ids: int, page_size: int = 4, salt: str | None = None) -> Content:
    return Content.from_tokens(ids, page_size=page_size, owner=0, salt=salt)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_block_keys_are_those_of_vllm(algorithm: str) -> None:
    root, first, second, third, unsalted, big = VLLM_KEYS[algorithm]
    assert root_key(algorithm).hex() == root  # type: ignore[arg-type]
    salted = BlockKeys(tokens(*range(100, 112), salt="tenant-a"), algorithm=algorithm)  # type: ignore[arg-type]
    assert [key.hex() for key in salted] == [first, second, third]
    plain = BlockKeys(tokens(*range(100, 112)), algorithm=algorithm)  # type: ignore[arg-type]
    assert plain[0].hex() == unsalted
    wide = BlockKeys(tokens(151643, 2**31, 0, 70000), algorithm=algorithm)  # type: ignore[arg-type]
    assert wide[0].hex() == big


def test_block_keys_end_with_the_known_pages() -> None:
    keys = BlockKeys(tokens(1, 2, 3, 4, 5))
    assert len(keys) == 1
    with pytest.raises(IndexError, match="page 1 of 1"):
        keys[1]


def test_an_unknown_algorithm_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"no block key algorithm 'md5'.*sha256, sha256_cbor") as caught:
        root_key("md5")  # type: ignore[arg-type]
    assert "sha256_cbor" in str(caught.value)


units = st.lists(st.integers(0, 2), max_size=8)


@given(units, units, st.sampled_from([1, 2, 4, 6]), st.sampled_from([1, 2, 3, 4, 8]), st.data())
def test_pages_are_common_exactly_if_all_their_tokens_are(
    mine: list[int], theirs: list[int], unit_tokens: int, page_size: int, data: st.DataObject
) -> None:
    contents, spelled = [], []
    for owner, ids in enumerate((mine, theirs)):
        num_tokens = data.draw(st.integers(0, len(ids) * unit_tokens))
        packed = array("Q", ids).tobytes()
        content = Content(packed, num_tokens=num_tokens, page_size=page_size, unit_tokens=unit_tokens, owner=owner)
        contents.append(content)
        spelled.append([unit for unit in ids for _ in range(unit_tokens)][:num_tokens])
        assert content.tokens(0, num_tokens).tolist() == spelled[-1]
    common = 0
    while (
        all(len(tokens) >= (common + 1) * page_size for tokens in spelled)
        and spelled[0][: (common + 1) * page_size] == spelled[1][: (common + 1) * page_size]
    ):
        common += 1
    assert contents[0].common_pages(contents[1], 0, 99) == common
    for page in range(common):
        assert contents[0].key(page) == contents[1].key(page)
    if all(content.num_known_pages > common for content in contents):
        assert contents[0].key(common) != contents[1].key(common)


def test_unknown_tokens_are_private_to_their_owner() -> None:
    mine, other = (Content.from_tokens([1, 2], page_size=2, owner=owner) for owner in (1, 2))
    assert mine.key(0) == other.key(0)
    assert mine.key(1) != other.key(1)
    assert mine.common_pages(other, 0, 3) == 1
    assert mine.common_pages(mine, 0, 3) == 3


@pytest.mark.parametrize("ids", [[-1], [2**64], [1.5]])
def test_ids_out_of_range_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="whole numbers from 0"):
        Content.from_tokens(ids, page_size=2, owner=0)
