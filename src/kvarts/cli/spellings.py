"""vLLM's spellings of options: accepted if a command has the same option under another name, else explained."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import click

__all__ = ["ALIASES", "ANSWERS", "in_our_words"]

ALIASES = {
    "--num-gpu-blocks-override": "--pages",
    "--block-size": "--page-size",
    "--max-num-seqs": "--max-seqs",
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--tensor-parallel-size": "--tensor-parallel",
    "--tp": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--data-parallel-size": "--data-parallel",
    "--dp": "--data-parallel",
    "-dp": "--data-parallel",
    "--pipeline-parallel-size": "--pipeline-parallel",
    "--pp": "--pipeline-parallel",
    "-pp": "--pipeline-parallel",
    "--gpu-memory-utilization": "--memory-fraction",
    "--kv-cache-dtype": "--kv-dtype",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--no-enable-prefix-caching": "--no-prefix-caching",
}
"""Options of `vllm serve`, and the option here with the same meaning and values."""

ANSWERS = {
    "--cpu-offload-gb": "kvarts keeps weights on the device; for KV below it, give --host-memory 64GiB",
    "--enable-chunked-prefill": "prompts are always chunked; --max-batched-tokens sets the largest chunk",
    "--enable-expert-parallel": "give --expert-parallel N, over how many devices experts are divided",
    "--enable-prefix-caching": "the prefix cache is on unless --no-prefix-caching is given",
    "--kv-offloading-size": "give --host-memory 64GiB",
    "--max-model-len": "a replay takes each request as long as the trace has it",
    "--num-gpu-blocks": "give --pages N",
    "--quantization": "give --weight-dtype fp8, and --kv-dtype for KV",
    "--scheduling-policy": "requests are ordered by priority and arrival; for another policy see "
    "docs/guide-policies.md",
    "--swap-space": "give --host-memory 64GiB",
    "-q": "give --weight-dtype fp8, and --kv-dtype for KV",
}
"""Options of `vllm serve` without an equivalent, and what to do instead."""


def in_our_words(args: Sequence[str], known: Collection[str]) -> list[str]:
    """Return `args` with vLLM's option names replaced. `known`: the options of the command.

    Raise UsageError for an option in ANSWERS. Words after `--` are not changed.
    """
    ours: list[str] = []
    for place, word in enumerate(args):
        if word == "--":
            return [*ours, *args[place:]]
        name, equals, value = word.partition("=")
        if name not in known:
            if ALIASES.get(name) in known:
                name = ALIASES[name]
            elif name in ANSWERS:
                raise click.UsageError(f"No such option: {name}: {ANSWERS[name]}.")
        ours.append(f"{name}{equals}{value}")
    return ours
