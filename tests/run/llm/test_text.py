"""Text of tokens, as they come: whatever the tokens, there is a text, and it is the tokenizer's own."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

pytest.importorskip("transformers", reason="real models need kvarts[torch]")

from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.run.text import Generation, TextOffsets, TokenBytes

from builders.byte_fallback import BYTES, byte_fallback_tokenizer

WORDS = ("as", "\u2581as", "\u2581\u00e9t\u00e9", "\U0001f600")
TOKENIZER = byte_fallback_tokenizer(WORDS)
FIRST_WORD = BYTES + 257
SPECIALS = (0, 1, 2)


def generation(tokenizer: Any = TOKENIZER, **settings: Any) -> Generation:
    request = Request(0, Content.from_tokens([1], page_size=4, owner=0), num_prompt_tokens=1, max_tokens=100)
    return Generation(request, SamplingParams(max_tokens=100, **settings), tokenizer)


def said(tokens: list[int], tokenizer: Any = TOKENIZER) -> str:
    made = generation(tokenizer)
    for token in tokens:
        assert not made.take(token)
    assert made.error is None
    return made.text


def byte(value: int) -> int:
    return BYTES + value


def test_bytes_that_never_become_a_character_end_nothing() -> None:
    """What was read stays; the bytes after it are what a decoder makes of them alone."""
    assert said([byte(0x0D), byte(0xEA), FIRST_WORD]) == "\r\ufffdas"
    assert said([FIRST_WORD, byte(0xE2), byte(0x82), FIRST_WORD + 1, byte(0xE2), byte(0x82), byte(0xAC)]) == (
        "as\ufffd\ufffd as\u20ac"
    )


@given(st.lists(st.integers(BYTES, FIRST_WORD + len(WORDS) - 1), max_size=40))
def test_any_tokens_have_a_text(tokens: list[int]) -> None:
    """Where all bytes are characters it is that of all tokens at once; else no word is lost."""
    text = said(tokens)
    whole = str(TOKENIZER.decode(tokens))
    if "\ufffd" not in whole:
        assert text == whole
    left = iter(text)
    words = "".join(str(TOKENIZER.decode([token])) for token in tokens if token >= FIRST_WORD)
    assert all(character in left for character in words)


@given(st.lists(st.integers(0, FIRST_WORD + len(WORDS) - 1), max_size=30))
def test_bytes_and_places_of_tokens_are_those_of_the_text(tokens: list[int]) -> None:
    known = TokenBytes(TOKENIZER)
    places = TextOffsets(known.of, start=5, skipped=known.special_ids)
    offsets = places.add(tokens)
    kept = [known.of(token) if token not in SPECIALS else b"" for token in tokens]
    for place, offset in enumerate(offsets):
        before = b"".join(kept[:place])
        characters = before.decode("utf-8", "replace")
        unfinished = len(characters) - len(characters.rstrip("\ufffd"))
        assert 5 + len(characters) - min(unfinished, 3) <= offset <= 5 + len(characters)
        if not unfinished:
            assert offset == 5 + len(characters)


def test_a_text_without_its_first_space() -> None:
    tokenizer = byte_fallback_tokenizer(("\u2581a", "\u2581as"), strips=True)
    known = TokenBytes(tokenizer)
    assert known.drops_first_space and not TokenBytes(TOKENIZER).drops_first_space
    tokens = [1, BYTES + 258, BYTES + 258]
    places = TextOffsets(known.of, skipped=known.special_ids, drops_first_space=True)
    assert (places.add(tokens), places.end) == ([0, 0, 2], len(tokenizer.decode(tokens, skip_special_tokens=True)))


def test_special_tokens_have_text_where_they_are_asked_for() -> None:
    plain, told = generation(), generation(skip_special_tokens=False, stop=("</s>",))
    for token in (FIRST_WORD, 1):
        assert not plain.take(token) and not told.take(token)
    assert (plain.text, told.text) == ("as", "as<s>")
    assert told.take(2) and told.text == "as<s>"
    assert not plain.take(2) and plain.text == "as"


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab"]), min_size=1, max_size=12),
    st.integers(0, 4),
    st.booleans(),
    st.data(),
)
def test_the_stop_text_that_is_whole_first_ends_the_text_however_it_comes(
    pieces: list[str], min_tokens: int, includes: bool, data: st.DataObject
) -> None:
    """Against the search after each character; of those that are whole at once, the first of the list."""
    stops = data.draw(st.lists(st.sampled_from(["ab", "b", "aa", "bab", "abb"]), max_size=3, unique=True))
    expected: tuple[str, str | None] = ("".join(pieces), None)
    text = ""
    for character, place in ((each, place) for place, piece in enumerate(pieces) for each in piece):
        text += character
        found = next((stop for stop in stops if text.endswith(stop)), None)
        if found is not None and place >= min_tokens:
            expected = text if includes else text.removesuffix(found), found
            break
    settings = {"stop": tuple(stops), "min_tokens": min_tokens, "include_stop_str_in_output": includes}
    made = generation(Pieces(pieces), **settings)
    told = ""
    for place in range(len(pieces)):
        is_over = made.take(place)
        assert made.final_text.startswith(told)
        told = made.final_text
        if is_over:
            break
    assert (made.text, made.stop_reason) == expected


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", ""]), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_the_text_that_may_begin_a_stop_text_is_held_back(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    """Against a search for each beginning of each stop text after each token."""
    made = generation(Pieces(pieces), stop=tuple(stops), min_tokens=min_tokens)
    for place in range(len(pieces)):
        if made.take(place):
            break
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max(len(beginning) for beginning in beginnings if made.text.endswith(beginning))
        assert made.final_text == made.text[: len(made.text) - held]


def test_a_long_text_takes_as_much_time_per_token_as_a_short_one() -> None:
    made = generation(Pieces([" word"]))
    began, num_chars = process_time(), 0
    for _ in range(60_000):
        made.take(0)
        num_chars += len(made.final_text[num_chars:])
    assert num_chars == 300_000
    assert process_time() - began < 1.0  # 0.1 s; 3 s if each token copies the text


def test_long_stop_texts_take_time_by_the_text_and_not_by_their_length() -> None:
    """A request may have sixteen of a thousand characters, and all others wait while the step looks for them."""
    pieces = ["aa" * 500, *["ab"] * 4000]
    made = generation(Pieces(pieces), stop=tuple("a" * 1000 + str(number) for number in range(16)))
    began = process_time()
    for place in range(len(pieces)):
        made.take(place)
        assert len(made.text) - len(made.final_text) <= 1000
    assert process_time() - began < 2.0  # 0.2 s; 45 s if each beginning is compared


@pytest.mark.parametrize(("own_ends", "reason"), [((), 7), ((7,), None)])
def test_a_stop_token_is_told_unless_it_is_the_own_end_of_the_model(
    own_ends: tuple[int, ...], reason: int | None
) -> None:
    request = Request(0, Content.from_tokens([1], page_size=4, owner=0), num_prompt_tokens=1, max_tokens=100)
    made = Generation(request, SamplingParams(stop_token_ids=(7, 8)), None, own_ends=own_ends)
    assert made.take(7, is_end=True)
    assert made.completion().stop_reason == reason


def test_the_text_of_a_stop_token_is_part_of_the_answer_where_that_is_asked_for() -> None:
    for includes, text in ((False, "sea"), (True, "sea and")):
        made = generation(Pieces(["sea", " and"]), stop_token_ids=(1,), include_stop_str_in_output=includes)
        assert not made.take(0) and made.take(1, is_end=True)
        assert (made.text, made.stop_reason) == (text, 1)


class Pieces:
    """A tokenizer that has these texts for the tokens 0, 1, and so on."""

    def __init__(self, pieces: list[str]) -> None:
        self.piece = pieces.__getitem__
