"""L6 with tiers below the device, on real models; skipped where PyTorch is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

from kvarts.base.errors import ConfigError
from kvarts.core.events import LoadStarted, StepDone
from kvarts.core.sampling import SamplingParams
from kvarts.core.tiers.config import OffloadConfig
from kvarts.run.torch.loading import load_model
from kvarts.run.torch.tiny import write_tiny

from builders.guessing import Oracle, answers_of, guessing
from builders.kept import Kept
from builders.real_models import GREEDY, PAGE_SIZE, engine_of, prompts_with_prefixes, undisturbed
from builders.windowed_models import forgetting


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("policy", ["eager", "lazy", "exclusive"])
def test_pages_that_went_through_host_memory_say_the_same(
    models: Callable[[str], tuple[Any, Any]], family: str, policy: Any
) -> None:
    model, reference = models(family)
    kept = Kept()
    offload = OffloadConfig(host_pages=200, policy=policy, kv_bytes_per_token=1)
    engine = engine_of(model, num_pages=30, budget=64, offload=offload, readers=[kept])
    prompts = prompts_with_prefixes()
    for prompt in [*prompts, *reversed(prompts)]:
        completion = engine.generate([prompt], GREEDY)[0]
        assert list(completion.tokens) == undisturbed(reference, prompt, GREEDY.max_tokens)
    loads = [event for event in kept.events if isinstance(event, LoadStarted)]
    assert loads, "nothing ever came back from host memory"


def test_preempted_requests_come_back_with_their_generated_tokens(
    models: Callable[[str], tuple[Any, Any]],
) -> None:
    """Pages that only a victim has, of tokens that it generated, are loaded and not computed again."""
    model, reference = models("qwen3")
    random = Random(4)
    prompts = [[random.randrange(250) for _ in range(9)] for _ in range(4)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    computed, loaded = [], []
    for offload in (None, OffloadConfig(host_pages=200)):
        kept = Kept()
        engine = engine_of(model, num_pages=36, budget=64, offload=offload, readers=[kept])
        told = engine.generate(prompts, params)
        for prompt, one in zip(prompts, told, strict=True):
            assert list(one.tokens) == undisturbed(reference, prompt, 60)
        steps = [event for event in kept.events if isinstance(event, StepDone)]
        assert sum(len(step.preemptions) for step in steps) > 1
        computed.append(sum(step.num_tokens for step in steps))
        loads = [event for event in kept.events if isinstance(event, LoadStarted)]
        loaded.append(sum(count for load in loads for _, count in load.by_tier) * PAGE_SIZE)
    assert loaded[0] == 0
    assert loaded[1] > 9, "more than a prompt"
    assert computed[1] <= computed[0] - loaded[1] // 2
    engine.check()


@pytest.mark.parametrize(("family", "policy"), [("qwen3", "eager"), ("gemma3", "eager"), ("qwen3", "exclusive")])
def test_pages_that_went_through_files_say_the_same(
    models: Callable[[str], tuple[Any, Any]], family: str, policy: Any, tmp_path: Path
) -> None:
    """L6 with host memory for little and files below it, and again in a second engine that finds the files."""
    model, reference = models(family)
    prompts = prompts_with_prefixes()
    expected = [undisturbed(reference, prompt, GREEDY.max_tokens) for prompt in prompts]
    offload = OffloadConfig(host_pages=8, disk_pages=300, policy=policy)
    kept = Kept()
    engine = engine_of(model, num_pages=30, budget=64, offload=offload, disk_path=tmp_path, readers=[kept])
    for prompt, tokens in [*zip(prompts, expected, strict=True)] * 2:
        assert list(engine.generate([prompt], GREEDY)[0].tokens) == tokens
    loads = [event for event in kept.events if isinstance(event, LoadStarted)]
    assert sum(dict(load.by_tier).get("disk", 0) for load in loads) > 0
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) > 30, "more than the device holds"
    again = engine_of(model, num_pages=30, budget=64, offload=offload, disk_path=tmp_path)
    for prompt, tokens in zip(prompts, expected, strict=True):
        completion = again.generate([prompt], GREEDY)[0]
        assert list(completion.tokens) == tokens
    assert again.generate([prompts[2]], GREEDY)[0].cached_tokens > 0


def test_files_of_another_model_are_not_read(tmp_path: Path) -> None:
    """Two models of one config with other weights: each finds its own pages, and none of the other's."""
    offload = OffloadConfig(host_pages=8, disk_pages=300)
    prompt = prompts_with_prefixes()[2]
    cached = []
    for seed in (0, 1, 0):
        write_tiny("qwen3", tmp_path / "model", seed=seed)
        engine = engine_of(load_model(tmp_path / "model"), offload=offload, disk_path=tmp_path / "pages")
        cached.append(engine.generate([prompt], GREEDY)[0].cached_tokens)
        engine.generate([[1]], GREEDY)  # steps that finish what is under way
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_tiers_that_cannot_be_are_refused(models: Callable[[str], tuple[Any, Any]], tmp_path: Path) -> None:
    model, _ = models("qwen3")
    for offload, path in ((OffloadConfig(host_pages=8, disk_pages=8), None), (OffloadConfig(host_pages=8), tmp_path)):
        with pytest.raises(ConfigError, match="disk_path: a tier of files needs both its size and its directory"):
            engine_of(model, offload=offload, disk_path=path)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"load_overlap": "layers"}, "load_overlap: does not go with a real model: a real executor copies whole pages"),
    ],
)
def test_what_only_replays_model_is_refused(
    models: Callable[[str], tuple[Any, Any]], setting: dict[str, Any], why: str
) -> None:
    model, _ = models("qwen3")
    with pytest.raises(ConfigError, match=why):
        engine_of(model, offload=OffloadConfig(host_pages=8, **setting))


def test_guesses_change_nothing_with_host_memory(
    models: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = models("qwen3")
    prompts = prompts_with_prefixes()
    answers = answers_of(model, prompts)
    guessing(monkeypatch, Oracle(answers))
    engine = engine_of(
        model, num_pages=40, budget=16, offload=OffloadConfig(host_pages=200), speculative_config="ngram"
    )
    for _ in range(2):
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
    assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 50
    assert engine.transfers[0].counts["num_stores"] > 0


@pytest.mark.parametrize("keeps", ["all", "tails"])
def test_guesses_change_nothing_with_host_memory_and_kv_groups(
    windowed: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch, keeps: str
) -> None:
    """Parts are loaded and stored beside guesses, in memory that forgets what nothing holds."""
    model, reference = windowed("gemma3_text")
    prompts = prompts_with_prefixes()
    answers = {tuple(prompt): undisturbed(reference, prompt, GREEDY.max_tokens) for prompt in prompts}
    guessing(monkeypatch, Oracle(answers, most=11))
    settings: dict[str, Any] = {"kv_groups": keeps, "offload": OffloadConfig(host_pages=200)}
    engine = engine_of(model, num_pages=30, budget=24, attention="sdpa", speculative_config="ngram", **settings)
    forgetting(engine)
    for _ in range(2):
        for prompt, completion in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(completion.tokens) == answers[tuple(prompt)]
    assert engine.drafts is not None and engine.drafts.num_accepted_tokens > 50
    counts = engine.transfers[0].counts
    assert counts["num_stores"] > 0 and counts["num_loads"] > 0
    engine.check()
