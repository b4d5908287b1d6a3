from __future__ import annotations

from array import array

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content, pack_units
from kvarts.core.keys import APART, Adapter, BlockKeys, root_key, salt_of_adapter, salt_parts

# The block hashes of vLLM 0.32.0's own requests, of tokens 100..111 in blocks of 4 with the salt "tenant-a": the root
# key, then three pages; then the first page without a salt, and a page of the ids 151643, 2**31, 0, 70000.
VLLM_KEYS = {
    "sha256": (
        "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        "749184ef43d40d21d4804393c2861535202b942ed016446cb8c2e5427ce513de",
        "47f98c3a70f8ecb1a95a78ab60e95f2004eef1bfe167a216864d8851a07a4de6",
        "417eba3eb42820154a6e698e133fb6a38cc5468a8abb1947a3ed49440dc736e4",
        "007f699eb7d4928d9961af00e454b36a0a0a4098a8d565689dc54be60c72d352",
        "0ef08f5785a4429fd257407e409fe956264a5b45d9a5db8d1bc2896240a72f1a",
    ),
    "sha256_cbor": (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
        "e47ecb1ac5a3bb44efc9204df04748ccdaee7575e9ec93c7d7a8c6b251fb9bfa",
        "c888640d0e1994e2f6478d86270f638d0fd4357f516a64257c2458af7e7d754e",
        "36404953d116849e02c788579a3700813f484e57a89d9db8d0dac8fe6caab757",
        "f6660814c0f5fab668e3a3e4cc9d7c843f32e254d6a433791cccfba573d0cf8a",
        "5818da805e394dcddde235efb13774b4c27eda18ed89af3a4fbda7406962fcc3",
    ),
}

# The same of tokens 100..107 for the adapter "sql" in /adapters/sql: two pages without a salt, and two with "tenant-a".
VLLM_KEYS_OF_ADAPTERS = {
    "sha256": (
        "714da4e7cd684611817e8ca517fd5bdb86be8b1f791566c22430c517b9514b40",
        "35704b18b614cd501d82e39b03f98792b4e76fe988e8212c19de75c5ceac5b45",
        "aca41fa4b7f0e4eab2084e91c92a024b42ba4663fec122681bce177aa4ea1742",
        "43633d39507d479e810b8bb7b7beecaa4592042351105394f3e2a49f794c6e4a",
    ),
    "sha256_cbor": (
        "924622d14a55ffff4f54287ac72c79d82f2a2dbbe05f3239f7c871a5953c51d6",
        "32527bb2c2cdca6cef049550dc0f4a251ca458b25d68a43abed1c340ba164a42",
        "8ee68a8a9d18918fa0275a915c724d6c817931b324e95ebb8e9875f18e4c1dc1",
        "631e05fc0c665352ceadcd513393d8034a7836d855e36eab483046cbfbc14ecf",
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


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_block_keys_of_an_adapter_are_those_of_vllm(algorithm: str) -> None:
    found = []
    for salt in (None, "tenant-a"):
        content = tokens(*range(100, 108), salt=salt_of_adapter(Adapter("sql", "/adapters/sql"), salt))
        found += [key.hex() for key in BlockKeys(content, algorithm=algorithm)]  # type: ignore[arg-type]
    assert tuple(found) == VLLM_KEYS_OF_ADAPTERS[algorithm]


@pytest.mark.parametrize("text", ["", "=path", "a\0b", "a\x1eb=c", "a=b\0", "a=" + "x" * 5000])
def test_an_adapter_that_no_salt_could_be_of_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=PATH"):
        Adapter.of(text)


@given(st.text(min_size=1), st.text(), st.none() | st.text())
def test_a_salt_gives_back_its_adapter(name: str, path: str, salt: str | None) -> None:
    adapter = Adapter(name, path)
    assume(not adapter.complaint() and APART not in (salt or ""))
    assert salt_parts(salt_of_adapter(adapter, salt)) == (adapter, salt or "")
    assert salt_parts(salt) == (None, salt or "")


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


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.sampled_from([(1, 2), (1, 3), (4, 2), (4, 4), (6, 4)]),
    st.integers(0, 3),
)
def test_pages_with_lookahead_are_equal_if_the_tokens_after_them_are(
    mine: list[int], others: list[int], sizes: tuple[int, int], lookahead: int
) -> None:
    """Law: pages are equal as far as all tokens up to their ends, and as many after them, are known and equal."""
    unit_tokens, page_size = sizes
    one, other = (
        Content(
            pack_units(units),
            num_tokens=len(units) * unit_tokens,
            page_size=page_size,
            unit_tokens=unit_tokens,
            owner=owner,
            lookahead=lookahead,
        )
        for owner, units in enumerate([mine, others])
    )
    spelled = [[unit for unit in units for _ in range(unit_tokens)] for units in (mine, others)]
    num_alike = next(
        (place for place, (a, b) in enumerate(zip(*spelled, strict=False)) if a != b), min(map(len, spelled))
    )
    num_equal = max(0, num_alike - lookahead) // page_size
    assert one.common_pages(other, 0, 100) == num_equal
    assert one.num_known_pages == max(0, len(spelled[0]) - lookahead) // page_size
    if num_equal < min(one.num_known_pages, other.num_known_pages):
        assert one.key(num_equal) != other.key(num_equal)
