"""Replays that start as a version of vLLM starts; `tests/equal` compares their steps with vLLM's scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay

from builders.case import Case, Row


def started(model: str, device: str = "h100-80gb", engine: str = "vllm==0.32", **given: Any) -> ReplayConfig:
    return ReplayConfig.for_device(model, device, engine=engine, **given)


def test_windows_come_first_and_retain_few_parts() -> None:
    """gpt-oss-20b: 12 layers with windows are the first group of vLLM's plan; one of its blocks is no block."""
    config = started("gpt-oss-20b", pages=150_186)
    assert [(group.layer.kind, group.num_layers) for group in config.memory.groups] == [("window", 12), ("full", 12)]
    assert (config.page_size, config.max_num_batched_tokens, config.max_num_seqs) == (16, 8192, 1024)
    assert (config.num_blocks, config.retention_interval, config.async_scheduling) == (150_185, 0, True)
    assert config.to_builtins()["start"]["lines"][-1].startswith("GPU KV cache size: 2,133,894 tokens")


def test_states_are_in_the_pool() -> None:
    """Qwen3.5-27B: three groups of states before a full one, in blocks of 784 tokens."""
    config = started("qwen3.5-27b", "h200", max_seqs=64)
    memory = config.memory
    assert [group.layer.kind for group in memory.groups] == ["state", "state", "state", "full"]
    assert (config.page_size, memory.aligns, memory.num_state_blocks) == (784, True, 0)


def test_one_group_is_counted_in_whole_pages() -> None:
    config = started("qwen3-8b", pages=5000)
    assert (config.kv_groups, config.num_pages, config.retention_interval) == ("off", 4999, None)
    small = started("qwen3-8b", "l4", max_model_len=8192)
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)


def test_a_prompt_of_whole_pages_is_found_again_up_to_its_last_page() -> None:
    """With interval 0, a prompt of 48 tokens retains what it resumes with after 32; a longer one finds no more."""
    rows = [Row(0, [0, 1, 2], 48, 1, None, 0, None), Row(1000, [0, 1, 2], 48, 1, None, 0, None)]
    rows.append(Row(2000, [0, 1, 2, 3], 64, 1, None, 0, None))
    case = Case(rows, 16, 16, 300, 64, 4, "default", 1)
    window = started("gpt-oss-20b").memory.groups
    report = replay(case.trace(), case.config(kv_groups="all", groups=window, prefix_cache_retention_interval=0))
    dense = replay(case.trace(), case.config(kv_groups="all", groups=window))
    assert report.request_columns["cached_tokens"].tolist() == [0, 32, 32]
    assert dense.request_columns["cached_tokens"].tolist() == [0, 32, 48]


@pytest.mark.parametrize(
    ("model", "engine", "given", "words"),
    [
        ("gpt-oss-20b", "vllm==0.32", {"pages": 100}, "To serve at least one request"),
        ("qwen3.5-27b", "vllm==0.32", {"pages": 1500, "max_model_len": 4000, "max_seqs": 2000}, "exceeds available"),
        ("qwen3.5-27b", "vllm==0.33", {"max_seqs": 64}, "saves states inside chunks"),
        ("gemma-4-31b", "vllm==0.32", {"tensor_parallel": 2}, "a replay has one size"),
        ("gpt-oss-20b", "vllm==0.32", {"kv_groups": "tails"}, "is what engine decides"),
        ("gpt-oss-20b", "vllm==0.32", {"host_memory": "8GiB"}, "does not go with tiers"),
        ("gpt-oss-20b", "vllm", {"max_model_len": 100}, "is of a start of vLLM"),
        ("gpt-oss-20b", "vllm", {"prefix_cache_retention_interval": 24}, "must be none, 0 or a multiple of 16 tokens"),
    ],
)
def test_what_does_not_start_says_why(model: str, engine: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        started(model, engine=engine, **given)
