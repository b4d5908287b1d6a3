"""Sampling parameters are values: no PyTorch, checked where they are made."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvarts
from kvarts.base.errors import ConfigError
from kvarts.core.sampling import MOST_CHOICES, SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
        {"stop": 7},
        {"stop": ("a", 3)},
        {"stop_token_ids": 5},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": (2**70,)},
        {"seed": 2**70},
        {"seed": -1},
        {"seed": "x"},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": None},
        {"presence_penalty": [1]},
    ],
)
def test_what_is_out_of_range_is_named(bad: dict[str, object]) -> None:
    (field,) = bad
    with pytest.raises(ConfigError, match=rf"sampling\.{field}: "):
        SamplingParams(**bad)  # type: ignore[arg-type]


def test_a_choice_of_more_texts_than_are_compiled_is_named() -> None:
    texts = tuple(map(str, range(MOST_CHOICES + 1)))
    assert StructuredOutputs(choice=texts[1:]).choice == texts[1:]
    with pytest.raises(ConfigError, match=r"structured_outputs\.choice: has 10,001 texts, and at most 10,000"):
        StructuredOutputs(choice=texts)


def test_one_text_is_one_stop() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[7, 8]).stop_token_ids == (7, 8)  # type: ignore[arg-type]
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))  # type: ignore[arg-type]


def test_argmax_is_enough_for_greedy_requests_only() -> None:
    assert SamplingParams(top_k=5, top_p=0.5, seed=1).is_argmax
    for other in (
        SamplingParams(temperature=0.1),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(logprobs=True),
    ):
        assert not other.is_argmax


def test_pytorch_is_not_needed() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvarts; print(kvarts.SamplingParams().max_tokens)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "128\n"
    assert kvarts.SamplingParams is SamplingParams
