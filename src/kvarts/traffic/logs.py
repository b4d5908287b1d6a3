"""Readers for logs of served requests: Qwen-Bailian's traces, OpenAI-style responses, and LiteLLM's spend logs.

Qwen-Bailian (usage traces of Alibaba): `chat_id`, `parent_chat_id` (-1 for a first turn), `timestamp` in seconds,
`input_length`, `output_length`, `hash_ids` of 16 tokens each. A chat with a parent is a later turn of its session.

A log of responses: `created` (seconds) and `usage` with `prompt_tokens` and `completion_tokens`, as in responses of the
OpenAI API. A spend log: `startTime`, `prompt_tokens`, `completion_tokens`, `status`, `session_id`. Neither records the
contents of prompts, so no two prompts share a prefix; `prompt_tokens_details` is ignored.

Other fields are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvarts.content import pack_units
from kvarts.errors import ConfigError, InputError
from kvarts.traffic.rows import date_ns, load_rows, unlike_any_other
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.trace_file import TraceFile

__all__ = ["load_bailian", "load_spend_log", "load_usage_log"]

BAILIAN_TOKENS = 16

Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]


class _Chat(msgspec.Struct, gc=False):
    chat_id: int
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]
    parent_chat_id: int = -1


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Tokens
    completion_tokens: Count


class _Response(msgspec.Struct, gc=False):
    created: Seconds
    usage: _Usage


class _Spend(msgspec.Struct, gc=False):
    start: str = msgspec.field(name="startTime")
    prompt_tokens: Count
    completion_tokens: Count
    request_id: str | None = None
    status: str | None = None


def load_bailian(
    path: Path | str | TraceFile, *, trace_block_size: int | None = None, skip_bad_lines: bool = False
) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""
    unit_tokens = trace_block_size or BAILIAN_TOKENS
    first_turns: dict[int, int] = {}

    def request(row: int, chat: _Chat) -> TraceRequest:
        if len(chat.hash_ids) * unit_tokens < chat.input_length:
            raise InputError(
                f"{len(chat.hash_ids)} ids of {unit_tokens} tokens cover {len(chat.hash_ids) * unit_tokens} of the "
                f"{chat.input_length} tokens of input_length",
                field="hash_ids",
            )
        try:
            units = pack_units(chat.hash_ids)
        except ConfigError:
            raise InputError("ids must be from 0 to 2**64 - 1", field="hash_ids") from None
        first = first_turns[chat.chat_id] = first_turns.get(chat.parent_chat_id, chat.chat_id)
        return TraceRequest(
            row,
            round(chat.timestamp * 1e9),
            units,
            chat.input_length,
            chat.output_length,
            session_id=str(first),
        )

    return load_rows(TraceFile.of(path), _Chat, request, unit_tokens=unit_tokens, skip_bad_lines=skip_bad_lines)


def load_usage_log(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input."""

    def request(row: int, response: _Response) -> TraceRequest:
        usage = response.usage
        units = unlike_any_other(row, usage.prompt_tokens)
        # The prompt of an aborted request was computed, which yields a token.
        num_output = max(1, usage.completion_tokens)
        return TraceRequest(row, round(response.created * 1e9), units, usage.prompt_tokens, num_output)

    return load_rows(TraceFile.of(path), _Response, request, skip_bad_lines=skip_bad_lines, knows_prefixes=False)


def load_spend_log(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError; InputError, with line and field, for malformed input.

    Rows with the `status` `failure`, and rows without prompt tokens (images, audio), are left out and counted.
    """

    def request(row: int, spend: _Spend) -> TraceRequest | str:
        start_ns = date_ns(spend.start, "startTime")
        if spend.status == "failure":
            return "failed"
        if not spend.prompt_tokens:
            return "without prompt tokens"
        units = unlike_any_other(row, spend.prompt_tokens)
        num_output = max(1, spend.completion_tokens)
        return TraceRequest(row, start_ns, units, spend.prompt_tokens, num_output, request_id=spend.request_id)

    return load_rows(TraceFile.of(path), _Spend, request, skip_bad_lines=skip_bad_lines, knows_prefixes=False)
