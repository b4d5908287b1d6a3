"""A Drafter for the toy model, right or wrong as it is told to be."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvarts.core.request import Request
from kvarts.core.sched.plan import Batch

from builders.toy_model import NUM_TOKEN_IDS, generate

__all__ = ["KNOWING", "Guesser", "Knowing", "guessers"]


class Guesser:
    """A Drafter that knows what the toy model says, and is wrong as often as it is told to be."""

    def __init__(self, seed: int, *, wrong: float, most: int, checks: bool = True) -> None:
        self._random = Random(seed)
        self._wrong = wrong
        self._most = most
        self._checks = checks
        self.judged: list[tuple[int, int, int]] = []

    def draft(self, request: Request, num_most: int, batch: Batch) -> npt.NDArray[np.uint64]:
        known = request.content.tokens(0, request.content.num_known_tokens).tolist()
        prompt = known[: request.num_prompt_tokens]
        output = known[request.num_prompt_tokens :]
        count = self._random.randint(0, min(num_most, self._most))
        said = generate(prompt, len(output) + count)
        assert said[: len(output)] == output or not self._checks, "all known tokens are in the content"
        tokens = said[len(output) :]
        for place in range(count):
            if self._random.random() < self._wrong:
                tokens[place] = self._random.randrange(NUM_TOKEN_IDS)
        return np.array(tokens, np.uint64)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.judged.append((request.index, num_drafted, num_accepted))


def guessers() -> st.SearchStrategy[Guesser]:
    return st.builds(
        Guesser, st.integers(0, 1 << 16), wrong=st.sampled_from([0.0, 0.2, 0.6, 1.0]), most=st.integers(1, 9)
    )


class Knowing:
    """A Drafter that is told what requests generate, and is wrong as often as it is told to be."""

    def __init__(self, seed: int, wrong: float, most: int) -> None:
        self.tokens: list[tuple[Any, list[int]]] = []
        self.num_accepted = self.num_drafted = 0
        self._random = Random(seed)
        self._wrong = wrong
        self._most = most

    def draft(self, request: Request, num_most: int, batch: Batch) -> npt.NDArray[np.uint64]:
        known = request.content.num_known_tokens
        following = self.tokens[request.index][1][known:][: self._random.randint(0, min(num_most, self._most))]
        return np.array([token + (self._random.random() < self._wrong) for token in following], np.uint64)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


KNOWING = st.builds(Knowing, st.integers(0, 1 << 16), st.sampled_from([0.0, 0.2, 0.6, 1.0]), st.integers(1, 11))
