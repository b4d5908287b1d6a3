"""Keys of blocks equal those of vLLM 0.33's own requests: salts, adapters, images, and tokens that are hashed ahead.

`vllm_keys.json` was written by `python -m equal.keys --write`, with PYTHONHASHSEED set, since vLLM draws the root key
of xxhash at random otherwise.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equal.keys import ALGORITHMS, SEED, Drawn, keys_of
from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.keys import BlockKeys, Medium, root_key

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_keys.json").read_text())
HAS_XXHASH = find_spec("xxhash") is not None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_are_those_of_vllm(algorithm: str) -> None:
    if algorithm.startswith("xxhash") and not HAS_XXHASH:
        pytest.skip("needs the package xxhash")
    assert root_key(algorithm, SEED).hex() == VECTORS["roots"][algorithm]  # type: ignore[arg-type]
    requests = [each for each in VECTORS["requests"] if each["algorithm"] == algorithm]
    for each in requests:
        assert keys_of(msgspec.convert(each, Drawn)) == each["keys"], each
    assert len(requests) >= 25


def test_the_vectors_have_every_kind_of_extra_key() -> None:
    requests = [each for each in VECTORS["requests"] if each["keys"]]
    for name in ("salt", "adapter", "media", "lookahead"):
        assert sum(bool(each[name]) for each in requests) >= 20, name


def test_a_page_has_a_key_when_the_tokens_after_it_are_known() -> None:
    content = Content.from_tokens(range(8), page_size=4, owner=0)
    keys = BlockKeys(content, lookahead=1)
    assert len(keys) == 1
    with pytest.raises(IndexError, match="page 1 of 1 known"):
        keys[1]
    other = BlockKeys(Content.from_tokens([0, 1, 2, 3, 9], page_size=4, owner=0), lookahead=1)
    assert keys[0] != other[0], "the token after the page is hashed"


def test_an_image_is_in_the_pages_that_have_its_tokens() -> None:
    content = Content.from_tokens([0] * 12, page_size=4, owner=0)
    plain, first, other = (
        list(BlockKeys(content, media=media)) for media in ((), [Medium("a", 5, 2)], [Medium("b", 5, 2)])
    )
    assert plain[0] == first[0] == other[0]
    assert len({plain[1], first[1], other[1]}) == len({plain[2], first[2], other[2]}) == 3


@pytest.mark.skipif(HAS_XXHASH, reason="xxhash is installed")
def test_keys_without_their_package_are_refused() -> None:
    with pytest.raises(ConfigError, match="need the package xxhash"):
        root_key("xxhash")
