"""Names of 0.1 that go on working for one release, and say what they are called now."""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import kvarts
from kvarts.llm.llm import LLM


def test_engine_is_llm() -> None:
    with pytest.warns(DeprecationWarning, match=r"kvarts\.Engine is now kvarts\.LLM"):
        assert getattr(kvarts, "Engine") is LLM  # noqa: B009  # not a name that type checkers know
    with pytest.warns(DeprecationWarning, match=r"kvarts\.live\.engine is now kvarts\.llm\.llm"):
        module = import_module("kvarts.live.engine")
    with pytest.warns(DeprecationWarning, match=r"kvarts\.Engine is now kvarts\.LLM"):
        assert module.Engine is LLM


def test_sampling_params_are_where_they_were() -> None:
    assert import_module("kvarts.executor.torch.sampling").SamplingParams is kvarts.SamplingParams
