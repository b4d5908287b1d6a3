"""Reads the log of vLLM with `--enable-logging-iteration-details`: one line per step, with its work and duration.

A line gives requests and tokens of prompts (context) and of decodes (generation), the duration of the step, and the
share of the KV cache in use. The log of a server also has a line with the size of that cache in tokens. The tokens
attended to are inferred from both: the decodes of a step know the tokens in the cache minus those of the step's
prompts. The prompts of a step are taken to share its context tokens equally and to begin at their first token. A long
prompt that is computed in chunks therefore attends to more than is assumed here, and the decodes of its steps to less.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvarts.calibrate.stepfit import StepRecord
from kvarts.errors import InputError
from kvarts.files import read_text
from kvarts.limits import LATEST_NS, MOST_COUNT, MOST_PAGES

__all__ = ["IterationLog", "is_iteration_log", "load_iterations"]

NS_PER_MS = 1e6
FIRST_BYTES = 1 << 22
"""A server logs many lines before its first step."""
MOST_PROMPTS = 1 << 16
"""Limit per step; each prompt is kept as an object."""
NUMBER = r"(\d{1,18})"
STEP = re.compile(
    rf"Iteration\({NUMBER}\): {NUMBER} context requests, {NUMBER} context tokens, {NUMBER} generation requests, "
    rf"{NUMBER} generation tokens, iteration elapsed time: (\d{{1,18}}\.\d+) ms( \(dummy\))?"
    r"(?:, \w+ KV cache usage: (\d{1,3}\.\d+)%)?(, encoder inputs: )?"
)
ANY_STEP = "Iteration("
CACHE = re.compile(r"KV cache size: ([\d,]{1,24}) tokens")


class IterationLog(msgspec.Struct, frozen=True):
    """The `steps` in the log of an engine with `num_cache_tokens`, and the number of lines useless for a fit."""

    steps: list[StepRecord]
    num_cache_tokens: int
    num_left_out: int

    @property
    def left_out(self) -> str | None:
        """The lines left out, in words; None without any."""
        if not self.num_left_out:
            return None
        return f"{self.num_left_out:,} steps without tokens, or with inputs of an encoder, are left out"


def is_iteration_log(path: Path | str) -> bool:
    """Return whether a file appears to be a server log with steps."""
    try:
        with Path(path).open("rb") as file:
            return ANY_STEP.encode() in file.read(FIRST_BYTES)
    except OSError:
        return False


def load_iterations(path: Path | str) -> IterationLog:
    """Read the log of a server, from its start.

    Raise MissingFileError; InputError, with the line, for a step that is malformed or speculative, for a log without
    the size of the KV cache or with several sizes, and for one without steps.
    """
    path = Path(path)
    num_cache_tokens: int | None = None
    steps: list[StepRecord] = []
    num_left_out = 0
    for number, line in enumerate(read_text(path, hint="Check the path of the log.").splitlines(), 1):
        if (cache := CACHE.search(line)) is not None:
            size = int(cache[1].replace(",", "") or 0)
            if not 0 < size <= MOST_PAGES or num_cache_tokens not in (None, size):
                raise InputError(
                    f"has a KV cache of {cache[1]} tokens"
                    + ("" if num_cache_tokens is None else f", after one of {num_cache_tokens:,}"),
                    path=path,
                    line=number,
                    hint="Give the log of one server, from one start.",
                )
            num_cache_tokens = size
        if ANY_STEP not in line:
            continue
        found = STEP.search(line)
        if found is None:
            raise InputError(
                "is not a whole line of a step", path=path, line=number, hint="Mend the line, or delete it."
            )
        if num_cache_tokens is None:
            raise InputError(
                "is before the line with the size of the KV cache",
                path=path,
                line=number,
                hint="Give the log of the server from its start: it has a line 'GPU KV cache size: N tokens'.",
            )
        try:
            step = _step(found, num_cache_tokens)
        except InputError as error:
            raise InputError(error.what, path=path, line=number, hint=error.hint) from error
        if step is None:
            num_left_out += 1
        else:
            steps.append(step)
    if num_cache_tokens is None or not steps:
        raise InputError(
            "holds no step of a server",
            path=path,
            hint="Start vLLM with --enable-logging-iteration-details, and with logging of statistics on.",
        )
    return IterationLog(steps, num_cache_tokens, num_left_out)


def _step(found: re.Match[str], num_cache_tokens: int) -> StepRecord | None:
    """Return a step; None for one that computed nothing or had encoder inputs."""
    num_prompts, num_prompt_tokens, num_decodes, num_decode_tokens = (int(found[index]) for index in range(2, 6))
    if found[7] is not None or found[9] is not None or not num_prompt_tokens + num_decode_tokens:
        return None
    if max(num_prompt_tokens, num_decode_tokens) > MOST_COUNT or num_prompts > MOST_PROMPTS:
        raise InputError("has more tokens, or prompts, than a step can have")
    if num_decode_tokens != num_decodes:
        raise InputError(
            f"computes {num_decode_tokens} tokens for {num_decodes} requests that generate",
            hint="Turn speculative decoding off for the run that calibrates.",
        )
    if not 0 < num_prompts <= num_prompt_tokens and num_prompts + num_prompt_tokens:
        raise InputError(f"computes {num_prompt_tokens} tokens of {num_prompts} prompts")
    if found[8] is None:
        raise InputError("does not state the share of the KV cache in use", hint="Use vLLM 0.30 or later.")
    duration_ns = round(float(found[6]) * NS_PER_MS)
    if not 0 < duration_ns <= LATEST_NS:
        raise InputError(f"takes {found[6]} ms", hint="Delete the line.")
    num_known = round(float(found[8]) / 100 * num_cache_tokens) - num_prompt_tokens
    each, num_longer = divmod(num_prompt_tokens, num_prompts) if num_prompts else (0, 0)
    lengths = [each + (index < num_longer) for index in range(num_prompts)]
    return StepRecord(
        duration_ns=duration_ns,
        num_decodes=num_decodes,
        decode_known_tokens=max(num_known, num_decodes) if num_decodes else 0,
        chunks=[(0, length, length) for length in lengths],
    )
