"""/v1/embeddings of a mock: unit vectors that depend only on the tokens of a text, in the time of its prefill.

A vector is a feature hash: each token and each pair of adjacent tokens adds +1 or -1 at a few hashed places. Equal
texts have equal vectors, and the similarity of two texts grows with the words they share.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.doors.openai.answer import Choice
from kvarts.doors.openai.bodies import CompletionBody
from kvarts.doors.openai.budget import INLINE_BYTES
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.generation import AnswerUnderWay, Exchange, asks_of
from kvarts.doors.openai.served import Ask, Models, Served
from kvarts.run.mock import next_tokens

__all__ = ["Embeddings", "EmbeddingsBody", "embedding"]

DIMENSIONS = 1024
MOST_DIMENSIONS = 4096
NUM_PLACES = 8
"""Per token, and per pair."""
NUM_PACKED = 16
"""Numbers in base64 that take the memory of one JSON value."""


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[Any] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    priority: int | None = None
    cache_salt: str | None = None


def embedding(tokens: Sequence[int], dimensions: int) -> npt.NDArray[np.float32]:
    """Return the unit vector of one or more tokens, float32 of shape [dimensions]."""
    ids = np.asarray(tokens, np.uint64)
    pairs = next_tokens(ids[:-1], ids[1:], seed=0, vocab_size=2**63)
    features = np.concatenate([ids, pairs])[:, None]
    drawn = next_tokens(features, np.arange(NUM_PLACES, dtype=np.uint64)[None, :], seed=1, vocab_size=2 * dimensions)
    places, signs = (drawn // np.uint64(2)).astype(np.int64), 1.0 - 2.0 * (drawn % np.uint64(2)).astype(np.float64)
    vector = np.bincount(places.ravel(), signs.ravel(), dimensions)
    norm = float(np.linalg.norm(vector))
    if not norm:  # all terms cancel
        vector[0] = norm = 1.0
    return (vector / norm).astype(np.float32)


class Embeddings:
    """The embeddings of mocks."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def create(self, exchange: Exchange) -> None:
        """Answer POST /v1/embeddings."""

        def read() -> tuple[Served, EmbeddingsBody, list[Ask], list[npt.NDArray[np.float32]]]:
            body = exchange.take_body(EmbeddingsBody)
            served = self._models.of(body.model)
            if served.answers is None:
                raise ApiError(400, "embeddings are of mocks: this model generates", param="model")
            dimensions = DIMENSIONS if body.dimensions is None else body.dimensions
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise ApiError(400, f"must be from 1 to {MOST_DIMENSIONS}, got {dimensions}", param="dimensions")
            asked = CompletionBody(
                model=body.model,
                prompt=body.input,
                priority=body.priority,
                cache_salt=body.cache_salt,
                prompt_logprobs=0,  # computes the whole prompt, and generates nothing
            )
            try:
                given = asked.prompts()
                exchange.budget.draw_sequences(len(given), 1)
                num_each = dimensions // NUM_PACKED if body.encoding_format == "base64" else dimensions
                exchange.budget.draw_values(len(given) * num_each, "input")
                prompts = [
                    served.encode(text, exchange.budget, add_special_tokens=True)
                    if isinstance(text, str)
                    else served.checked(text)
                    for text in given
                ]
                asks = asks_of(served, asked, prompts, 0, exchange, top_logprobs=None, has_end=False)
            except ApiError as error:
                error.param = "input" if error.param == "prompt" else error.param
                raise
            return served, body, asks, [embedding(tokens, dimensions) for tokens in prompts]

        # A short body may contain a thousand inputs.
        served, body, asks, vectors = await exchange.apart(read, num_bytes=INLINE_BYTES)
        num_tokens = sum(len(ask.tokens) for ask in asks)
        under_way = AnswerUnderWay(served, exchange, asks, None)
        try:
            await _ends(under_way, under_way.choices)
            exchange.failure.before_answer()
            payload = await exchange.work(
                lambda: _told(body, served, vectors, num_tokens), num_bytes=sum(vector.nbytes for vector in vectors)
            )
            await exchange.failure.write_whole(exchange.response, payload)
        finally:
            await under_way.end()


async def _ends(under_way: AnswerUnderWay, choices: Sequence[Choice]) -> None:
    """Wait until all choices end."""
    num_open = len(choices)
    while num_open:
        num_open -= sum(piece[3] is not None for piece in await under_way.answer.take())


def _told(body: EmbeddingsBody, served: Served, vectors: Sequence[npt.NDArray[np.float32]], num_tokens: int) -> bytes:
    is_packed = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": b64encode(vector.astype("<f4").tobytes()).decode() if is_packed else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": data,
            "model": body.model or served.names[0],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )
