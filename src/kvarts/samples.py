"""Bundled files, and names that stand for them wherever a file is read: `sample:mooncake`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvarts.errors import MissingFileError, did_you_mean

__all__ = ["PREFIX", "SAMPLES", "BundledTrace", "located", "sample_of", "where_samples_are"]

PREFIX = "sample:"
DATA = Path(__file__).parent / "data"


class BundledTrace(NamedTuple):
    """A bundled trace: its file or folder in `data`, a description, and the tokens per hash id if not 512."""

    file: str
    what: str
    trace_block_size: int | None = None


SAMPLES = {
    "agents": BundledTrace("coding-agents", "twelve sessions of coding agents from kv-cache-tester (Apache-2.0)"),
    "mooncake": BundledTrace(
        "mooncake-conversation-1000.jsonl", "the first 1,000 requests of Mooncake's conversation trace (Apache-2.0)"
    ),
    "azure-chat": BundledTrace(
        "azure-conv-1000.csv", "the first 1,000 requests of Azure's chat trace of 2023 (CC BY 4.0)"
    ),
    "azure-code": BundledTrace(
        "azure-code-1000.csv", "the first 1,000 requests of Azure's code trace of 2023 (CC BY 4.0)"
    ),
    "vllm-rtx4090": BundledTrace(
        "vllm-rtx4090/prompts.jsonl",
        "the 300 ShareGPT requests of a run of vLLM 0.19.0 on an RTX 4090, from LLMServingSim (MIT)",
        trace_block_size=16,
    ),
}
"""The bundled traces by name; `sample:NAME/FILE` stands for another file of the sample's folder."""


def located(path: Path | str) -> Path:
    """Return the file that `path` stands for: a bundled one for `sample:NAME`, else `path` itself.

    Raise MissingFileError for an unknown sample.
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    name, _, inner = text.removeprefix(PREFIX).partition("/")
    sample = SAMPLES.get(name)
    if sample is None:
        names = [PREFIX + each for each in SAMPLES]
        hint = did_you_mean(text, names) or f"Bundled are {', '.join(names)}."
        raise MissingFileError("is not bundled", path=text, hint=hint)
    if not inner:
        return DATA / sample.file
    folder = DATA / sample.file.partition("/")[0]
    inside = folder / inner
    if ".." in inside.parts or not inside.is_file():
        files = ", ".join(sorted(f"{PREFIX}{name}/{file.name}" for file in folder.iterdir())) if folder.is_dir() else ""
        raise MissingFileError("is not bundled", path=text, hint=f"Bundled are {files or PREFIX + name}.")
    return inside


def sample_of(path: Path | str) -> BundledTrace | None:
    """Return the bundled trace that `path` names; None for a user's file."""
    text = str(path)
    return SAMPLES.get(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else None


def where_samples_are(path: Path | str) -> str:
    """Return a hint for a trace that does not exist: the sample of that name, or how to list all samples."""
    name = Path(path).name
    for known, sample in SAMPLES.items():
        if name in (sample.file, known):
            return f"A trace of that name is bundled: {PREFIX}{known}."
    return "Check the path of the trace; `kvarts trace list` lists the bundled ones."
