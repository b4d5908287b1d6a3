"""`kvarts profile`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli import record
from kvarts.cli.llm import (
    PromptLine,
    encode_prompts,
    llm_options,
    need_torch,
    open_llm,
    read_prompts,
    sampling_options,
    sampling_params,
)
from kvarts.cli.options import INPUT, OUTPUT, Command
from kvarts.cli.process import print_json
from kvarts.errors import KvartsError
from kvarts.files import check_writable, is_standard_output, whole_file, write_whole

if TYPE_CHECKING:
    from kvarts.llm.llm import LLM
    from kvarts.sampling import SamplingParams

__all__ = ["profile_command"]


@click.command("profile", cls=Command)
@llm_options
@click.option("--prompts", "prompts_file", metavar="FILE", required=True, type=INPUT,
              help='JSON lines {"prompt": TEXT}.')  # fmt: skip
@record.kv_timeline_option
@click.option("--record", "steps_file", metavar="FILE", type=OUTPUT,
              help="Write the batch and the duration of each "
                   "step, one JSON line per step, for `kvarts calibrate`.")  # fmt: skip
@click.option("--write-trace", "trace_file", metavar="FILE", type=OUTPUT,
              help="Write the requests to FILE, token by "
                   "token, for `kvarts replay FILE --trace-block-size 1`.")  # fmt: skip
@sampling_options
def profile_command(prompts_file: Path, steps_file: Path | None, trace_file: Path | None, **values: Any) -> None:
    """Run prompts on a real model, and print the times and the use of KV pages, as JSON."""
    lines = read_prompts(prompts_file)
    if (bad := next((line.error for line in lines if line.error is not None), None)) is not None:
        raise bad
    kv_timeline = values.get("kv_timeline")
    for file in (steps_file, trace_file):
        if file is not None:
            check_writable(file)
    need_torch()
    from kvarts.executor.wrappers import RecordingExecutor
    from kvarts.llm.profile import Profile

    params = sampling_params(values)
    profile = Profile()
    with ExitStack() as stack:
        wrap = None
        if steps_file is not None:
            steps = stack.enter_context(whole_file(steps_file))

            def wrap(executor: Any) -> Any:
                return RecordingExecutor(executor, steps)

        llm = open_llm(values, readers=[profile], wrap=wrap)
        profile.live = record.open_live(
            stack, values, llm.config, llm.tiers, num_blocks=llm.num_pages, memory=llm.kv_blocks
        )
        profile.run(llm, _encoded(llm, lines, params, prompts_file), params)
    if trace_file is not None:
        write_whole(trace_file, profile.trace)
    if not any(map(is_standard_output, (steps_file, trace_file, kv_timeline))):
        print_json(profile.summary)


def _encoded(llm: LLM, lines: Sequence[PromptLine], params: SamplingParams, path: Path) -> list[list[int]]:
    """Return the token ids of all prompts. Raise the error of the first that cannot be run."""
    tokens: list[list[int]] = []
    for one in encode_prompts(llm, lines, params, path):
        if isinstance(one, KvartsError):
            raise one
        tokens.append(one)
    return tokens
