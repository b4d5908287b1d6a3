"""Features that do not combine, with reasons, in one table. It is the source of all such errors and of docs/limits.md.

Features that are not listed together combine. Places are listed too: a row with a place is refused only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvarts.base.settings import SettingError

__all__ = ["FEATURES", "PLACES", "REFUSED", "Feature", "Refusal", "check_combination", "sentence", "why_not"]

PLACES = {
    "replay": "a replay",
    "plan": "a plan",
    "mock": "a mock",
    "model": "a real model",
    "sessions": "sessions",
    "several": "several models on a device",
    "fleet": "a fleet",
}
"""Places where features are used: the columns of the table, and their names. `sessions`: of a replay or a server."""


class Feature(NamedTuple):
    """A feature that users can request: its name in messages, the places where it exists, the feature it belongs to."""

    words: str
    places: tuple[str, ...] = tuple(PLACES)
    part_of: str = ""


LOAD_PLACES = ("replay", "plan", "mock", "sessions", "several", "fleet")

FEATURES = {
    "kv_groups": Feature("KV groups"),
    "states": Feature("layers with a state", part_of="kv_groups"),
    "states_by_page": Feature(
        "states by page", ("replay", "plan", "mock", "sessions", "several", "fleet"), part_of="kv_groups"
    ),
    "sinks": Feature("layers with a sink of their own", part_of="kv_groups"),
    "tiers": Feature("host memory"),
    "files": Feature("files below host memory", part_of="tiers"),
    "layers": Feature("loads by layer", LOAD_PLACES, part_of="tiers"),
    "async_loads": Feature("asynchronous loads without a place", LOAD_PLACES, part_of="tiers"),
    "sync_loads": Feature("synchronous loads", LOAD_PLACES, part_of="tiers"),
    "full_prompt_hits": Feature("hits of whole prompts", ("replay", "plan", "mock", "several", "fleet")),
    "orders": Feature("an eviction order other than LRU"),
    "bound": Feature(
        "a bound on inter-token latency", ("replay", "plan", "mock", "model", "sessions", "several", "fleet")
    ),
    "cadence": Feature("prompts every few steps only", ("replay", "plan", "mock", "several", "fleet")),
    "mocker": Feature("the profile 'mocker'", ("replay", "plan", "mock", "several", "fleet")),
    "uncached": Feature("an engine without a prefix cache", ("replay", "fleet")),
    "windows": Feature("sessions with a window", ("replay", "plan", "mock", "model", "sessions")),
    "drafts": Feature("draft tokens in the time of steps", ("replay", "plan", "sessions", "several", "fleet")),
    "speculation": Feature("guesses by n-grams", ("model", "sessions")),
    "first_drafts": Feature("guesses before prompts", ("model", "sessions"), part_of="speculation"),
    "kv_events": Feature("KV events over the network", ("replay", "mock", "sessions", "several", "fleet")),
    "prices": Feature("policies and prices of memory", ("plan",)),
    "record": Feature("a journal of what a server was asked", ("mock", "model")),
    "ranks": Feature("ranks in lock step", ("replay", "sessions")),
    "ahead": Feature("asynchronous scheduling", ("replay", "plan", "mock", "sessions", "several", "fleet")),
    "late_events": Feature("events that reach routers late", ("replay", "plan", "mock", "several", "fleet")),
    "store": Feature("a store that workers share", ("replay", "mock", "fleet")),
    "pulls": Feature("pages from other workers' host memory", ("replay", "mock", "fleet")),
    "pools": Feature("pools of workers, links and shared stores", ("replay", "mock", "fleet")),
    "pool_tables": Feature("tables of pools, links or stores in a file", ("replay", "mock", "fleet")),
    "counts": Feature("a number of workers", ("replay", "plan", "fleet")),
    "faults": Feature("workers and links that fail", ("replay", "mock", "fleet")),
    "scaling": Feature("workers that come and go", ("replay", "mock", "fleet")),
    "live_fleet": Feature("a fleet behind a router's door", ("mock",)),
    "fleets": Feature("a search for fleets", ("plan",)),
    "pipeline": Feature("stages of a pipeline", ("replay", "plan", "mock", "sessions", "fleet")),
    "state_dir": Feature("sessions on disk", ("mock", "model", "sessions")),
    "batches": Feature("the engine 'sglang'", ("replay", "plan", "mock")),
    "slots": Feature("the engine 'sglang' with states in slots", ("replay", "mock"), part_of="batches"),
    "start": Feature("a start of vLLM", ("replay", "plan", "mock", "fleet")),
    "sizes": Feature("blocks of several sizes", ("replay", "mock", "fleet"), part_of="start"),
    "started_drafts": Feature("drafts in a start of vLLM", ("replay", "plan", "mock"), part_of="start"),
    "fused": Feature("attention by FlashAttention or Triton", ("model",)),
}
"""Features that users can request: the rows of the table."""


class Refusal(NamedTuple):
    """Features that are refused `together`. The error names the setting of the first.

    `why` completes the sentence of the error. `{name}` in `hint` is replaced by the setting as the user would write it.
    """

    together: tuple[str, ...]
    why: str
    hint: str = "Leave one of them out."


WHOLE = "Leave it out, or set {kv_groups} to off."
REFUSED = (
    Refusal(("store", "ranks"), "it is not modelled", "Leave out {data_parallel}."),
    Refusal(("pulls", "ranks"), "it is not modelled", "Leave out {data_parallel}."),
    Refusal(("pulls", "store"), "what workers have in host memory is in the store as well"),
    Refusal(("layers", "model"), "a real executor copies whole pages", "Leave it out."),
    *(
        refusal
        for loads in ("async_loads", "sync_loads")
        for refusal in (
            Refusal((loads, "model"), "its requests wait with a place", "Leave it out."),
            Refusal((loads, "store"), "other workers can delay its loads", "Leave it out."),
            Refusal((loads, "pulls"), "other workers can delay its loads", "Leave it out."),
            Refusal((loads, "layers"), "each decides when a request runs"),
        )
    ),
    Refusal(("async_loads", "fleet"), "it is not modelled", "Leave it out."),
    Refusal(("full_prompt_hits", "kv_groups"), "the last token of a prompt may see what no hit needs", WHOLE),
    Refusal(("mocker", "kv_groups"), "Dynamo's mocker knows whole pages only", WHOLE),
    Refusal(
        ("sessions", "fleet"),
        "their tokens are on one worker, and other workers compute prompts, or take over when it leaves",
        "Leave them out. Without pools, a session stays with its replica.",
    ),
    Refusal(("ranks", "fleet"), "it is not modelled", "Leave out {data_parallel}."),
    Refusal(
        ("states_by_page", "uncached"), "such an engine keeps no states for prefixes", "Leave {mamba_cache_mode} out."
    ),
    Refusal(("fused", "windows"), "it reads no sinks", "Take sdpa, or numba on a CPU."),
    Refusal(("sessions", "mocker"), "Dynamo's mocker keeps no KV for sessions", "Take another profile."),
    Refusal(("sessions", "several"), "sessions are of one model"),
    Refusal(("record", "sessions"), "it is replayed request by request"),
    Refusal(("pipeline", "ranks"), "it is not modelled"),
    Refusal(("ranks", "several"), "it is not modelled"),
    Refusal(("pipeline", "several"), "it is not modelled"),
    Refusal(("ranks", "plan"), "a plan asks for replicas", "Replay the options you have in mind."),
    Refusal(("pools", "plan"), "without --gpus, its workers are alike", "Give --gpus N as well, or leave it out."),
    Refusal(("pool_tables", "fleets"), "its commands could not replace them", "Give them as options instead."),
    Refusal(("counts", "fleets"), "it finds these numbers", "Leave it out."),
    Refusal(("faults", "fleets"), "a script numbers the workers of one fleet", "Replay the fleet that you choose."),
    Refusal(("live_fleet", "several"), "its workers have one model each", "Leave out NAME= in --model."),
    Refusal(("uncached", "tiers"), "requests would find pages in host memory that they may not find on the device"),
    Refusal(("uncached", "store"), "requests would find pages there that they may not find on the device"),
    Refusal(("uncached", "orders"), "it evicts nothing that can be found"),
    Refusal(("uncached", "late_events"), "it has no pages to report"),
    Refusal(("uncached", "kv_events"), "it has no pages to report"),
    Refusal(("uncached", "sessions"), "sessions go on from their pages"),
    Refusal(("uncached", "plan"), "a plan is about what is found", "Replay the options you have in mind."),
    Refusal(("uncached", "several"), "it is not modelled", "Leave it out."),
    Refusal(("kv_groups", "batches"), "it divides memory as SGLang does", WHOLE),
    Refusal(("batches", "mocker"), "Dynamo's mocker decides as vLLM", "Leave one of them out."),
    *(
        Refusal(("batches", other), "it is not modelled", "Leave it out, and give the engine's settings one by one.")
        for other in ("sessions", "orders", "bound", "uncached", "ranks", "fleet", "several")
    ),
    Refusal(
        ("batches", "files"),
        "its storage has no limit of size",
        "Give {hicache_storage_backend} file with {hicache_ratio} in place of the size.",
    ),
    Refusal(
        ("slots", "plan"),
        "slots stay the same in all sizes of memory",
        "Replay the sizes that you have in mind, or give --kv-groups off, with which states are set aside.",
    ),
    Refusal(
        ("start", "several"),
        "vLLM plans one model for the whole device",
        "Leave it out, or give {engine} vllm, whose settings are then those of all models.",
    ),
    Refusal(("ahead", "several"), "models take turns, and a turn is planned when it begins", "Leave it out."),
    Refusal(
        ("start", "plan", "kv_groups"),
        "sizes of memory are in pages, and vLLM starts with few of them",
        "Replay the options you have in mind.",
    ),
    *(
        Refusal(("sizes", other), why, "Leave it out, or give {engine} none.")
        for other, why in (
            ("orders", "an order lists pages of one size"),
            ("tiers", "host memory has pages of one size"),
            ("sessions", "they keep pages of one size"),
            ("fleet", "workers send pages of one size"),
        )
    ),
    *(
        Refusal(("started_drafts", other), why, "Leave it out, or give {engine} none.")
        for other, why in (
            ("tiers", "vLLM names blocks otherwise with a connector"),
            ("fleet", "its workers need a connector, with which vLLM names blocks otherwise"),
            ("sessions", "it is not modelled"),
            ("ranks", "it is not modelled"),
            ("bound", "each decode takes the tokens of a whole draft"),
        )
    ),
    Refusal(("cadence", "windows"), "pages of such sessions are for prompts that go on in every step", "Leave it out."),
    Refusal(("bound", "several"), "steps of the other models lie between those of one", "Leave it out."),
)


def check_combination(given: Mapping[str, str]) -> None:
    """Raise SettingError if some of `given` are refused together. `given`: features and places, with their settings."""
    refusal = _refusal(given)
    if refusal is not None:
        blamed, *others = refusal.together
        raise SettingError(f"does not go with {_words(others)}: {refusal.why}", given[blamed], hint=refusal.hint)


def sentence(refusal: Refusal) -> str:
    """Return the sentence for `refusal` in the docs."""
    blamed, *others = refusal.together
    return f"{_words([blamed])} with {_words(others)}: {refusal.why}"


def why_not(*given: str) -> str:
    """Return the reason why some of `given` are refused together, as a clause; empty if they combine."""
    refusal = _refusal(dict.fromkeys(given, ""))
    if refusal is None:
        return ""
    blamed, *others = refusal.together
    return f"{_words([blamed])} cannot be combined with {_words(others)}, since {refusal.why}"


def _refusal(given: Mapping[str, str]) -> Refusal | None:
    return next((refusal for refusal in REFUSED if all(name in given for name in refusal.together)), None)


def _words(names: list[str]) -> str:
    *first, last = [FEATURES[name].words if name in FEATURES else PLACES[name] for name in names]
    return f"{', '.join(first)} and {last}" if first else last
