"""Readers for JSON lines that are not Mooncake's: Qwen-Bailian's traces, and logs of OpenAI-style responses.

Qwen-Bailian (usage traces of Alibaba): `chat_id`, `parent_chat_id` (-1 for a first turn), `timestamp` in seconds,
`input_length`, `output_length`, `hash_ids` of 16 tokens each. A chat that has a parent is a later turn of its session.

A log: `created` (seconds) and `usage` with `prompt_tokens` and `completion_tokens`, as responses of the OpenAI API have
them. It does not say what was in a prompt: every prompt is unlike any other, but for `prompt_tokens_details`, which is
left alone.

Other fields are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvarts.content import pack_units
from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.files import read_text
from kvarts.traffic.azure import UNIT_TOKENS, unlike_any_other
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["load_bailian", "load_rows", "load_usage_log"]

BAILIAN_TOKENS = 16

Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
RowT = TypeVar("RowT")


class _Chat(msgspec.Struct, gc=False):
    chat_id: int
    timestamp: Seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]
    parent_chat_id: int = -1


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Tokens
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Response(msgspec.Struct, gc=False):
    created: Seconds
    usage: _Usage


def load_bailian(path: Path | str, *, trace_block_size: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError, and InputError with line and field for what cannot be read."""
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

    path = Path(path)
    return load_rows(path, _text(path), _Chat, request, unit_tokens=unit_tokens, skip_bad_lines=skip_bad_lines)


def load_usage_log(path: Path | str, *, skip_bad_lines: bool = False) -> Trace:
    """Read a whole file. Raise MissingFileError, and InputError with line and field for what cannot be read."""

    def request(row: int, response: _Response) -> TraceRequest:
        usage = response.usage
        units = unlike_any_other(row, usage.prompt_tokens)
        # A request that was broken off had its prompt computed, and that yields a token.
        num_output = max(1, usage.completion_tokens)
        return TraceRequest(row, round(response.created * 1e9), units, usage.prompt_tokens, num_output)

    path = Path(path)
    return load_rows(
        path,
        _text(path),
        _Response,
        request,
        unit_tokens=UNIT_TOKENS,
        skip_bad_lines=skip_bad_lines,
        knows_prefixes=False,
    )


def load_rows(
    path: Path,
    text: str,
    kind: type[RowT],
    request_of: Callable[[int, RowT], TraceRequest | None],
    *,
    unit_tokens: int = 1,
    skip_bad_lines: bool,
    knows_prefixes: bool = True,
) -> Trace:
    """Read the lines of `text` as rows of a `kind`; the first arrival becomes 0. None for a row is no request.

    Raise InputError with line and field for what cannot be read, unless such lines are skipped and counted.
    """
    requests: list[TraceRequest] = []
    num_skipped = 0
    decoder = msgspec.json.Decoder(kind)
    for line, row in _lines(text):
        try:
            try:
                request = request_of(len(requests), decoder.decode(row))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                what, field = parts_of(error)
                raise InputError(what, field=field) from error
            except RecursionError:
                raise InputError("is nested too deeply") from None
            if request is not None:
                requests.append(request)
        except InputError as error:
            if not skip_bad_lines:
                hint = "Mend the line, or pass --skip-bad-lines to leave such lines out and count them."
                raise InputError(error.what, path=path, line=line, field=error.field, hint=hint) from error
            num_skipped += 1
    if not requests:
        raise InputError("has no requests", path=path, hint="A trace has one JSON object a line.")
    first_ns = min(request.arrival_ns for request in requests)
    requests = [msgspec.structs.replace(request, arrival_ns=request.arrival_ns - first_ns) for request in requests]
    requests.sort(key=lambda request: request.arrival_ns)
    return Trace(
        requests,
        unit_tokens=unit_tokens,
        knows_prefixes=knows_prefixes,
        name=path.name,
        num_skipped_lines=num_skipped,
    )


def _text(path: Path) -> str:
    return read_text(path, hint="Check the path of the trace.")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for line, row in enumerate(text.split("\n"), 1):
        if row.strip():
            yield line, row
