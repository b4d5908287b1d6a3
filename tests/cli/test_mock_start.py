"""`kvarts mock` of models that start as vLLM: the length for which it plans, and why a mock does not start so."""

from __future__ import annotations

from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.base.settings import given_by_keywords
from kvarts.cli.mock import engine_of_mock, without_drafts
from kvarts.cli.replaying import all_sections
from kvarts.doors.openai.opening import Door, mock_limits
from kvarts.sim.config import ReplayConfig

GEMMA = {"model": "gemma-4-31b", "device": "h100-80gb"}
TWO = {"model": "gemma-4-31b", "device": "h200", "tensor_parallel": 2}


@pytest.mark.parametrize(
    ("given", "max_model_len", "is_started", "words"),
    [
        (GEMMA, 15_000, True, ""),
        (GEMMA, None, False, "not as vLLM 0.33 starts: engine does not start on h100-80gb: To serve at least one"),
        (GEMMA, 20_000, False, "To serve at least one request with the model's max seq len (20000)"),
        (GEMMA | {"page_size": 16}, 15_000, False, ""),
        (TWO | {"host_memory": "8GiB"}, 15_000, False, "host memory has pages of one size"),
        ({"model": "qwen3-8b", "device": "h100-80gb"}, 4000, False, ""),
    ],
)
def test_a_mock_plans_for_its_longest_request(
    given: dict[str, Any],
    max_model_len: int | None,
    is_started: bool,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections = all_sections()
    config = engine_of_mock(given_by_keywords(given, sections), sections, max_model_len=max_model_len)
    assert (config.start is not None) is is_started
    said = capsys.readouterr().err
    assert words in said and bool(words) is ("not as vLLM" in said)


@pytest.mark.parametrize(
    ("given", "max_model_len", "words"),
    [
        ({"model": "qwen3-8b", "device": "h100-80gb"}, 50_000, r"max_model_len \(50000\) is greater"),
        (GEMMA, 20_000, r"the model's max seq len \(20000\)"),
    ],
)
def test_a_length_for_which_vllm_does_not_start_is_refused_with_this_length(
    given: dict[str, Any], max_model_len: int, words: str
) -> None:
    """Also where vLLM does not start for the model's own length either."""
    sections = all_sections()
    with pytest.raises(ConfigError, match=words):
        engine_of_mock(
            given_by_keywords(given | {"engine": "vllm==0.33"}, sections), sections, max_model_len=max_model_len
        )


LINE = {"model": "qwen3-8b", "device": "h100-80gb", "speculative_tokens": 3, "speculative_method": "mtp"}


@pytest.mark.parametrize(
    ("given", "has_drafts"),
    [
        (LINE, False),
        (LINE | {"engine": "vllm"}, False),
        (LINE | {"acceptance": "0.8,0.6,0.4"}, False),
        (LINE | {"engine": "vllm", "acceptance": "0.8,0.6,0.4"}, True),
    ],
)
def test_a_mock_has_drafts_if_it_starts_as_vllm_and_knows_how_many_are_right(
    given: dict[str, Any], has_drafts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = all_sections()
    config = engine_of_mock(without_drafts(given_by_keywords(given, sections)), sections)
    assert ("started_drafts" in config.features) is has_drafts
    assert ("drafts have no effect" in capsys.readouterr().err) is not has_drafts
    assert config.async_scheduling is ("engine" in given)


def test_a_mock_takes_no_longer_requests_than_the_start_of_vllm_plans_for() -> None:
    config = ReplayConfig.of_options(model="qwen3-8b", device="h100-80gb", engine="vllm")
    assert config.start is not None and config.start.max_model_len == 40_960
    assert mock_limits(Door(), config).max_model_len == 40_960
    shorter = ReplayConfig.of_options(model="qwen3-8b", device="h100-80gb", engine="vllm==0.33", max_model_len=1000)
    assert mock_limits(Door(), shorter).max_model_len == 1000
