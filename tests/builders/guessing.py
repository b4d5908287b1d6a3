"""Guesses for real models, right or wrong as they are told to be. Needs PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvarts.core.config import EngineConfig
from kvarts.core.request import Request
from kvarts.core.sampling import SamplingParams
from kvarts.core.sched.plan import Batch
from kvarts.run.torch.llm import LLM

from builders.real_models import GREEDY, VOCABULARY, Ids

__all__ = ["Oracle", "answers_of", "guessing", "untimed"]


class Oracle:
    """A Drafter that knows what will be said, by prompt, and is wrong as often as it is told to be."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], *, wrong: float = 0.25, most: int = 6) -> None:
        self._answers = answers
        self._wrong = wrong
        self._most = most
        self._random = Random(0)

    def draft(self, request: Request, num_most: int, batch: Batch) -> npt.NDArray[np.uint64]:
        known = request.content.tokens(0, request.content.num_known_tokens).tolist()
        num_prompt, random = request.num_prompt_tokens, self._random
        count = random.randint(0, min(self._most, num_most))
        answer = self._answers.get(tuple(known[:num_prompt]), ())[len(known) - num_prompt :][:count]
        tokens = [random.randrange(VOCABULARY) if random.random() < self._wrong else token for token in answer]
        return np.array(tokens, np.uint64)

    def judge(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass


def guessing(monkeypatch: pytest.MonkeyPatch, drafter: Any) -> None:
    """Let engines with speculation be made with this drafter."""
    monkeypatch.setattr("kvarts.run.torch.llm.NgramDrafter", lambda config, max_num_seqs, times: drafter)


def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines guess as if a step took as long as it most often does, whatever else the machine does now."""
    monkeypatch.setattr("kvarts.run.torch.llm.TIMED_STEPS", ())


def answers_of(model: Any, prompts: Sequence[Ids], params: SamplingParams = GREEDY) -> dict[tuple[int, ...], Ids]:
    """What the model says without speculation, a prompt at a time."""
    engine = _plain(model)
    return {tuple(prompt): list(engine.generate([prompt], params)[0].tokens) for prompt in prompts}


@cache
def _plain(model: Any) -> LLM:
    """An engine without speculation, of which one is enough for each model."""
    return LLM(model, None, EngineConfig(num_pages=64, page_size=16, max_num_seqs=1))
