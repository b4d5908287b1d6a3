"""Embeddings of a mock: unit vectors, the same for the same text, closer the more words are shared."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.doors.openai.embeddings import embedding
from kvarts.doors.openai.running import RunningServer
from kvarts.doors.openai.words import WordTokenizer

from builders.http_client import call

PATH = "/v1/embeddings"


def ask(server: RunningServer, given: Any, **fields: Any) -> Any:
    reply = call(server.url, PATH, {"input": given, **fields})
    assert reply.status == 200, reply.payload
    return reply.json


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.integers(1, 300))
def test_vectors_are_of_length_one_and_depend_on_the_tokens_alone(tokens: list[int], dimensions: int) -> None:
    vector = embedding(tokens, dimensions)
    assert vector.shape == (dimensions,) and np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert (vector == embedding(tuple(tokens), dimensions)).all()


def test_texts_with_words_in_common_are_closer() -> None:
    def close(one: str, other: str) -> float:
        encode = WordTokenizer().encode
        return float(embedding(encode(one), 1024) @ embedding(encode(other), 1024))

    text = "the cat sat on the garden wall in the evening light"
    assert close(text, text + " again") > 0.9 > close(text, "the cat was on the wall in the morning") > 0.4
    assert abs(close(text, "prices of stock and credit fell by half")) < 0.2
    assert close("dog and cat", "cat and dog") < 0.9


def test_inputs_and_forms(server: RunningServer) -> None:
    one = ask(server, "hello the world")
    (first,) = one["data"]
    assert one["usage"] == {"prompt_tokens": 4, "total_tokens": 4} and len(first["embedding"]) == 1024
    ids = WordTokenizer().encode("hello the world")
    several = ask(server, ["hello the world", "x"], encoding_format="base64", dimensions=1024)["data"]
    assert [each["index"] for each in several] == [0, 1]
    packed = np.frombuffer(b64decode(several[0]["embedding"]), "<f4")
    assert packed.tolist() == first["embedding"] == ask(server, ids)["data"][0]["embedding"]
    assert len(ask(server, [ids, [7]], dimensions=5)["data"][1]["embedding"]) == 5


def test_an_embedding_takes_the_time_of_its_prefill_and_generates_nothing() -> None:
    with RunningServer(page_size=16) as server:
        ask(server, "the " * 500)
        meter = server.opened.served.meter
        assert (meter.num_prompt_tokens, meter.num_generated_tokens) == (501, 0)
        assert sum(row["tokens"] for row in server.timeline()) == 501
        server.settle()
        server.assert_conserved()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": ["x", 3]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "x " * 200_000}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 5000}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": ["x"] * 1001}, "input"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(server: RunningServer, fields: Any, param: str) -> None:
    reply = call(server.url, PATH, fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.payload


def test_the_sdk(server: RunningServer) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        told = client.embeddings.create(model="mock", input=["hello", "the world"], dimensions=64)
        whole = client.embeddings.create(model="mock", input="hello", dimensions=64, encoding_format="float")
    assert [len(each.embedding) for each in told.data] == [64, 64]
    assert told.data[0].embedding == pytest.approx(whole.data[0].embedding)
