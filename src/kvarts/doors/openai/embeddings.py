"""/v1/embeddings of a mock: unit vectors that depend only on the tokens of a text, in the time of its prefill.

A vector is a feature hash: each token and each pair of adjacent tokens adds +1 or -1 at a few hashed places. Equal
texts have equal vectors, and the similarity of two texts grows with the words they share.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.doors.openai.bodies import CompletionBody
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.forms import Whole, WholeForm
from kvarts.doors.openai.generation import Dialect, Exchange, Reading
from kvarts.doors.openai.served import Models
from kvarts.run.mock import next_tokens

__all__ = ["EMBEDDINGS", "EmbeddingsBody", "embedding"]

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

    is_costly: ClassVar[bool] = True
    """A short body may contain a thousand inputs."""

    @property
    def num_dimensions(self) -> int:
        """The length of a vector."""
        return DIMENSIONS if self.dimensions is None else self.dimensions

    @property
    def is_packed(self) -> bool:
        """Whether vectors are bytes in base64."""
        return self.encoding_format == "base64"


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


def _read(body: EmbeddingsBody, exchange: Exchange, models: Models) -> CompletionBody:
    if models.of(body.model).answers is None:
        raise ApiError(400, "embeddings are of mocks: this model generates", param="model")
    dimensions = body.num_dimensions
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ApiError(400, f"must be from 1 to {MOST_DIMENSIONS}, got {dimensions}", param="dimensions")
    asked = CompletionBody(
        model=body.model,
        prompt=body.input,
        priority=body.priority,
        cache_salt=body.cache_salt,
        max_tokens=0,
        prompt_logprobs=0,  # computes the whole prompt, and generates nothing
    )
    num_each = dimensions // NUM_PACKED if body.is_packed else dimensions
    exchange.budget.draw_values(len(asked.prompts()) * num_each, "input")
    return asked


class EmbeddingForm(WholeForm):
    """A WholeForm: /v1/embeddings."""

    def __init__(self, body: EmbeddingsBody, read: Reading) -> None:
        self._model = body.model or read.served.names[0]
        self._is_packed = body.is_packed
        self._vectors = [embedding(ask.tokens, body.num_dimensions) for ask in read.asks]
        self.num_bytes = sum(vector.nbytes for vector in self._vectors)

    def whole(self, choices: Sequence[Whole], usage: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """Return the vectors."""
        told = [
            b64encode(vector.astype("<f4").tobytes()).decode() if self._is_packed else vector.tolist()
            for vector in self._vectors
        ]
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(told)]
        num_tokens = usage["prompt_tokens"]
        counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": self._model, "usage": counts})


EMBEDDINGS = Dialect(
    path="/v1/embeddings",
    about="Return the embedding of each input.",
    body=EmbeddingsBody,
    read=_read,
    form=EmbeddingForm,
    params={"prompt": "input"},
    samples=False,
)
