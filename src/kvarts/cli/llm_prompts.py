"""`kvarts generate` and `kvarts profile`: a real model computes prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.base.files import check_writable, is_standard_output, whole_file, write_whole
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
    speculation_option,
)
from kvarts.cli.options import INPUT, OUTPUT, Command, key_option
from kvarts.cli.process import draw, print_bytes, print_json, print_text

if TYPE_CHECKING:
    from kvarts.core.sampling import SamplingParams
    from kvarts.run.text import Completion
    from kvarts.run.torch.llm import LLM

__all__ = ["generate_command", "profile_command"]

EVERY_S = 0.5
"""Seconds between updates of the progress line in a terminal."""


@click.command("generate", cls=Command)
@llm_options
@speculation_option
@click.option(
    "--prompt", metavar="TEXT", help="One prompt; its answer is printed as it is generated. -: standard input."
)
@click.option("--prompts", "prompts_file", metavar="FILE", type=INPUT,
              help='Many, run as they fit: JSON lines {"prompt": TEXT} or {"messages": [...]}. A JSON line each is '
              "printed, in their order. -: standard input.")  # fmt: skip
@click.option("--chat", "is_chat", is_flag=True, help="--prompt is a user's message, for the model's chat template.")
@key_option("--skip-bad", is_flag=True,
            help="Run the other prompts where one cannot be run; its line has the error.")  # fmt: skip
@sampling_options
def generate_command(
    prompt: str | None, prompts_file: Path | None, is_chat: bool, skip_bad: bool, **values: Any
) -> None:
    """Generate text with a real model, its KV in pages."""
    if (prompt is None) == (prompts_file is None):
        raise ConfigError("give either", field="prompt", hint="Give --prompt TEXT or --prompts FILE.")
    lines = [] if prompts_file is None else read_prompts(prompts_file)
    if not skip_bad and (bad := next((line.error for line in lines if line.error is not None), None)) is not None:
        raise bad
    need_torch()
    params = sampling_params(values)
    llm = open_llm(values, speculative_config=values["speculative_config"])
    if prompts_file is not None:
        encoded = encode_prompts(llm, lines, params, prompts_file)
        if not skip_bad and (bad := next((one for one in encoded if isinstance(one, KvartsError)), None)) is not None:
            raise bad
        _Run(llm, params, skip_bad=skip_bad).all([(line.number, one) for line, one in zip(lines, encoded, strict=True)])
        return
    assert prompt is not None
    text = sys.stdin.read() if prompt == "-" else prompt
    tokens = llm.encode_chat([{"role": "user", "content": text}], params) if is_chat else llm.encode(text, params)
    if params.logprobs:
        print_bytes(msgspec.json.encode(llm.generate([tokens], params)[0]) + b"\n")
    else:
        _stream(llm, tokens, params)


class _Run:
    """A run of many prompts in one engine: prints answers in the order of prompts, and progress on standard error."""

    def __init__(self, llm: LLM, params: SamplingParams, *, skip_bad: bool) -> None:
        self._llm = llm
        self._params = params
        self._skip_bad = skip_bad
        self._num_tokens = 0
        self._num_ended = 0
        self._most_kv = 0.0

    def all(self, prompts: list[tuple[int, list[int] | KvartsError]]) -> None:
        """Run the prompts, each given with its line number; print one answer or error for each."""
        start_s = told_s = perf_counter()
        llm = self._llm
        waiting: list[tuple[int, int | KvartsError]] = []
        for number, prompt in prompts:
            try:
                waiting.append(
                    (number, prompt if isinstance(prompt, KvartsError) else llm.submit(prompt, self._params))
                )
            except ConfigError as error:
                if not self._skip_bad:
                    raise ConfigError(f"line {number}: {error.what}", hint=error.hint, field="prompts") from error
                waiting.append((number, error))
        waiting.reverse()
        done: dict[int, Completion] = {}
        is_terminal = sys.stderr.isatty()
        self._print_ready(waiting, done)
        while llm.has_work:
            self._most_kv = max(self._most_kv, llm.kv_live_bytes() / llm.kv_bytes())
            for completion in llm.step():
                done[completion.index] = completion
                self._num_ended += 1
                self._num_tokens += len(completion.tokens)
            self._print_ready(waiting, done)
            if is_terminal and perf_counter() - told_s > EVERY_S:
                told_s = perf_counter()
                draw(f"\r{self._figures(len(prompts), told_s - start_s)}\x1b[K")
        if is_terminal:
            draw("\r\x1b[K")
        drafts = "" if llm.drafts is None else f", {llm.drafts}"
        click.echo(f"{self._figures(len(prompts), perf_counter() - start_s)}{drafts}", err=True)

    def _figures(self, num_prompts: int, taken_s: float) -> str:
        """Return a line of progress; its tokens are those of prompts that have ended."""
        return (
            f"kvarts: {self._num_ended:,} of {num_prompts:,} prompts, {self._num_tokens:,} tokens in {taken_s:.1f} s: "
            f"{self._num_tokens / max(taken_s, 1e-9):,.1f} tokens/s, KV at most {self._most_kv * 100:.0f} % in use"
        )

    def _print_ready(self, waiting: list[tuple[int, int | KvartsError]], done: dict[int, Completion]) -> None:
        """Print answers that are ready, in the order of the prompts; the next prompt is the last of `waiting`."""
        while waiting:
            number, what = waiting[-1]
            if isinstance(what, KvartsError):
                click.echo(f"kvarts: left out: {what}", err=True)
                print_bytes(msgspec.json.encode({"line": number, "error": str(what)}) + b"\n")
            elif what in done:
                print_bytes(msgspec.json.encode(done.pop(what)) + b"\n")
            else:
                return
            waiting.pop()


def _stream(llm: LLM, prompt: list[int], params: SamplingParams) -> None:
    import asyncio

    async def stream_text() -> None:
        async for text in llm.stream(prompt, params):
            print_text(text)

    asyncio.run(stream_text())
    print_bytes(b"\n")


@click.command("profile", cls=Command)
@llm_options
@click.option("--prompts", "prompts_file", metavar="FILE", required=True, type=INPUT,
              help='JSON lines {"prompt": TEXT}.')  # fmt: skip
@record.kv_timeline_option
@click.option("--record", "steps_file", metavar="FILE", type=OUTPUT,
              help="Write the batch and the duration of each "
                   "step, one JSON line per step, for `kvarts calibrate`.")  # fmt: skip
@key_option("--write-trace", "trace_file", metavar="FILE", type=OUTPUT,
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
    from kvarts.run.torch.profile import Profile
    from kvarts.run.wrappers import RecordingExecutor

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
