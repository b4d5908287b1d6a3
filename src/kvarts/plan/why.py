"""What costs cache hits in a trace, per rule, with the cheapest mend; from messages, also where two prompts part.

A request is compared with the earlier one whose prefix it should share: the turn before it, else the last of its
session, with its first question, with its tools, with its system message. A rule undoes one difference: it orders the
tools as before, blanks times, puts dropped messages back. What the two prompts then share more is what the difference
costs. Of rules that give about the same, the first in RULES is named, and further ones are tried on what is left.

A loss counts as far as the request does not find these tokens in any other request. Hits are those of a cache without
limit, of whole pages; what a pool of some size loses besides is `evicted`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError
from kvarts.base.limits import check_whole
from kvarts.base.terminal import in_line
from kvarts.plan.curve import lru_curve, stack_distances
from kvarts.plan.reuse import Reuse, find_reuse
from kvarts.proof.explain.hits import HitLedger, hit_ledger, stored_ledger
from kvarts.proof.explain.reading import Journal
from kvarts.proof.journal import AdmittedLine
from kvarts.sim.traffic.formats import form_of, load_trace
from kvarts.sim.traffic.messages import load_messages
from kvarts.sim.traffic.prompts import WORDS, Chat, Prompts, reasoning_of
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import TraceFile

__all__ = ["RULES", "Loss", "Rule", "Why", "why", "why_of_journal"]

PAGE_SIZE = 16
KEPT_CHARS, ID_CHARS = 48 << 20, 32
"""Characters of earlier requests that are kept to compare later ones with."""
MOST_CAUSES = 3
LEAST_TOKENS = 8
"""A difference that costs less than half a usual block is none."""
NEARLY = 0.9
SHOWN_CHARS = 32
Pair = tuple[Chat, Chat]
Undo = Callable[[Chat, Chat], Pair | None]
replaced = msgspec.structs.replace
encode = msgspec.json.encode

_VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\d{1,2}:\d\d(?::\d\d)?(?: ?[AP]M\b)?"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
    r"|\b(?:January|February|March|April|May|June|July|August|September|October|November|December)\b"
    r"|\b(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b"
    r"|\b[0-9a-fA-F]{5,}\b|\b(?=\w*\d)\w+\b|\d+"
)
"""Times, dates, ids, nonces and counters."""
_INLINE = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


class Rule(msgspec.Struct, frozen=True):
    """A way to lose hits: its name, what happens, and the cheapest mend. `undo`: removes it from two requests."""

    name: str
    cause: str
    mend: str
    undo: Undo | None = None


class Loss(msgspec.Struct):
    """What a rule costs: prompt tokens, requests, and where its first case is. `shows`: the text there, and before."""

    rule: str
    cause: str
    mend: str
    tokens: int = 0
    requests: int = 0
    where: str = ""
    shows: list[str] = []


class Why(msgspec.Struct, frozen=True):
    """Hits of a trace, and what costs hits, the most first. `recorded_tokens`: hits that its usage records.

    `hit_tokens`: None where they are not known.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int | None
    page_size: int
    losses: list[Loss]
    notes: list[str] = []
    recorded_tokens: int | None = None
    pages: int | None = None

    def to_json(self) -> bytes:
        """Return indented JSON, with a line end."""
        return msgspec.json.format(encode(self), indent=2) + b"\n"

    def to_text(self) -> str:
        """Return a table for people, with a line end."""
        lines = [f"{self.requests:,} requests, {self.prompt_tokens:,} prompt tokens"]
        if self.hit_tokens is None:
            lines = [f"{self.requests:,} stretches of stored pages, {self.prompt_tokens:,} tokens"]
        else:
            share = self.hit_tokens / max(1, self.prompt_tokens)
            held = "if nothing is evicted" if self.pages is None else f"in {self.pages:,} pages"
            lines.append(f"hits {share:.1%} ({self.hit_tokens:,} tokens), {held}, in pages of {self.page_size} tokens")
        if self.recorded_tokens is not None:
            lines.append(f"its usage records hits of {self.recorded_tokens:,} tokens")
        if self.losses and self.hit_tokens is not None:
            most = (self.hit_tokens + sum(loss.tokens for loss in self.losses)) / max(1, self.prompt_tokens)
            lines.append(f"without the losses below: {min(1.0, most):.1%}")
        elif not self.losses:
            lines.append("nothing costs hits: prompts share all that they have in common")
        for loss in self.losses:
            share = loss.tokens / max(1, self.prompt_tokens)
            counted = f"{loss.tokens:,} tokens ({share:.1%}) of {loss.requests:,} requests"
            lines += ["", f"{loss.rule}: {counted}", f"  {loss.cause}"]
            lines += [f"  {loss.where}"] if loss.where else []
            lines += [f"    {text}" for text in loss.shows]
            lines.append(f"  mend: {loss.mend}")
        return "\n".join([*lines, *(["", *(f"note: {note}" for note in self.notes)] if self.notes else [])]) + "\n"


def why(
    *paths: Path | str,
    tokenizer: str = WORDS,
    chat_template: str | None = None,
    page_size: int = PAGE_SIZE,
    pages: int | None = None,
    skip_bad_lines: bool = False,
    on_read: Callable[[int], object] | None = None,
) -> Why:
    """Return what costs hits in traces. Files with messages are compared as one log; another trace is given alone.

    Raise MissingFileError; InputError; ConfigError for several traces without messages, or a size below 1.
    """
    for name, value in (("page_size", page_size), ("pages", pages)):
        if value is not None:
            check_whole(value, name)
    files = [TraceFile(path) for path in paths]
    for file in files:
        file.on_read = on_read
    if not all(file.is_directory or ((form := form_of(file)) and form.name == "messages") for file in files):
        if len(files) > 1:
            raise ConfigError("are several, and not all have messages", field="TRACE", hint="Give one trace.")
        return _of_trace(load_trace(paths[0], skip_bad_lines=skip_bad_lines, on_read=on_read), page_size, pages)
    prompts = Prompts(tokenizer, chat_template)
    partings = _Partings(prompts, page_size)
    trace = load_messages(*files, prompts=prompts, skip_bad_lines=skip_bad_lines, output_tokens=1, watch=partings.add)
    return _of_trace(trace, page_size, pages, partings)


def _of_trace(trace: Trace, page_size: int, pages: int | None, partings: _Partings | None = None) -> Why:
    reuse = find_reuse(trace, page_size)
    hits = np.bincount(reuse.request, reuse.hittable, len(reuse.prompt_tokens)).astype(np.int64) * page_size
    rows = [request.row for request in trace]
    losses: dict[str, Loss] = {}
    if partings is None:
        _of_ids(trace, dict(zip(rows, hits.tolist(), strict=True)), losses)
    else:
        partings.count(dict(zip(rows, hits.tolist(), strict=True)), losses)
    num_hits = int(hits.sum())
    notes = [note for note in trace.said() if "tokens: " not in note or partings is not None]
    if partings is not None and (dated := partings.dated):
        notes.append(f"line {dated} of the template writes the date: prompts of two days share nothing behind it")
    if pages is not None:
        num_hits -= _evicted(losses, reuse, pages)
    return Why(
        len(rows),
        reuse.num_prompt_tokens,
        num_hits,
        page_size,
        sorted(losses.values(), key=lambda loss: (-loss.tokens, loss.rule)),
        notes,
        None if partings is None else partings.recorded,
        pages,
    )


def _evicted(losses: dict[str, Loss], reuse: Reuse, pages: int) -> int:
    """Add and return the tokens of hits that prefix LRU loses in a pool of `pages`."""
    distances = stack_distances(reuse)
    lost = reuse.hittable - np.clip(pages - distances, 0, reuse.hittable)
    if not lost.any():
        return 0
    curve = lru_curve(reuse, distances)
    loss = losses["evicted"] = _new("evicted")
    loss.tokens = int(lost.sum()) * reuse.page_size
    loss.requests = int((np.bincount(reuse.request, lost) > 0).sum())
    keeping = f"{curve.size_for(0.95):,} pages of {reuse.page_size} tokens keep 95 % of the hits"
    loss.where = f"{keeping}, {curve.most_pages:,} all"
    return loss.tokens


def _new(name: str) -> Loss:
    rule = RULES_BY_NAME[name]
    return Loss(rule.name, rule.cause, rule.mend)


def _add(losses: dict[str, Loss], name: str, tokens: int, where: str = "", shows: list[str] | None = None) -> None:
    loss = losses.setdefault(name, _new(name))
    loss.tokens += tokens
    loss.requests += 1
    if not loss.where:
        loss.where, loss.shows = where, shows or []


def _of_ids(trace: Trace, hits: Mapping[int, int], losses: dict[str, Loss]) -> None:
    """Find losses in a trace without texts: salts, and turns that do not begin as the turn before."""
    turns: dict[str, Any] = {}
    tenants: dict[bytes, str | None] = {}
    for request in trace.requests or ():
        units = request.units if isinstance(request.units, bytes) else b""
        first = units[:8]
        if first and tenants.setdefault(first, request.tenant) != request.tenant and not hits[request.row]:
            _add(losses, "salt", trace.unit_tokens, f"row {request.row + 1}, tenant {request.tenant}")
        before = turns.get(request.session_id or "")
        if request.session_id is not None:
            turns[request.session_id] = request
        if before is None or not units:
            continue
        whole = before.num_prompt_tokens // trace.unit_tokens * trace.unit_tokens
        lost = min(whole, request.num_prompt_tokens) - hits[request.row]
        if lost >= trace.unit_tokens:
            where = (
                f"row {request.row + 1} shares {hits[request.row]:,} of the {whole:,} tokens of row {before.row + 1}"
            )
            _add(
                losses,
                "shortened" if request.num_prompt_tokens < before.num_prompt_tokens else "rewritten",
                lost,
                where,
            )


def why_of_journal(journal: Journal) -> Why:
    """Return what cost hits in a run that `kvarts replay` recorded, or in an engine that `kvarts watch` followed.

    KV events name stored pages and no requests, so that hits are not known: what was stored again counts.
    """
    if any(isinstance(line, AdmittedLine) for line in journal.lines):
        return _of_ledger(hit_ledger(journal), journal.page_size)
    found = _of_ledger(stored_ledger(journal), journal.page_size)
    note = "KV events name no hits: requests are stretches of stored pages, and losses what was stored again"
    return replaced(found, hit_tokens=None, notes=[note])


def _of_ledger(ledger: HitLedger, page_size: int) -> Why:
    losses: dict[str, Loss] = {}
    ended_by = ledger.ended_by
    is_of_state = any("state" in name for name in ended_by) and not any("window" in name for name in ended_by)
    for kind, name in (
        ("evicted", "evicted"), ("alignment", "block"), ("not_kept", "no state" if is_of_state else "not kept"),
        ("recomputed", "preempted"), ("renamed", "other name"),
    ):  # fmt: skip
        if ledger.tokens.get(kind):
            loss = losses[name] = _new(name)
            loss.tokens = ledger.tokens[kind]
            loss.requests = sum(bool(of.get(kind)) for of in ledger.by_request.values())
            if kind == "evicted":
                loss.where = ledger.gone_for
            elif kind == "not_kept":
                loss.where = ", ".join(f"{count:,} hits ended by {group}" for group, (count, _) in ended_by.items())
            elif kind == "alignment":
                loss.where = f"pages of {page_size} tokens"
    hits = sum(tokens for kind, tokens in ledger.tokens.items() if kind.endswith("_hit"))
    found = sorted(losses.values(), key=lambda loss: (-loss.tokens, loss.rule))
    return Why(len(ledger.by_request), ledger.prompt_tokens, hits, page_size, found)


# Rules: each undoes one difference of two requests.


def _contents(chat: Chat, change: Callable[[str], str]) -> Chat:
    """Return a request with all its texts changed."""

    def of(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": change(message["content"])}

    return replaced(
        chat,
        messages=[of(message) for message in chat.messages],
        answer=None if chat.answer is None else of(chat.answer),
        prompt=change(chat.prompt) if isinstance(chat.prompt, str) else chat.prompt,
    )


def _undo_salt(ref: Chat, row: Chat) -> Pair | None:
    return None if ref.salt == row.salt else (ref, replaced(row, salt=ref.salt))


def _undo_model(ref: Chat, row: Chat) -> Pair | None:
    return None if ref.model == row.model else (ref, replaced(row, model=ref.model))


def _undo_variables(ref: Chat, row: Chat) -> Pair | None:
    return None if ref.variables == row.variables else (ref, replaced(row, variables=ref.variables))


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _undo_order(ref: Chat, row: Chat) -> Pair | None:
    mine, theirs = list(map(_canonical, row.tools or ())), list(map(_canonical, ref.tools or ()))
    if mine == theirs or sorted(mine) != sorted(theirs):
        return None
    return ref, replaced(row, tools=ref.tools)


def _undo_keys(ref: Chat, row: Chat) -> Pair | None:
    if encode(ref.tools) == encode(row.tools) or _canonical(ref.tools) != _canonical(row.tools):
        return None
    return ref, replaced(row, tools=ref.tools)


def _undo_tools(ref: Chat, row: Chat) -> Pair | None:
    return None if ref.tools == row.tools else (ref, replaced(row, tools=ref.tools))


def _undo_volatile(ref: Chat, row: Chat) -> Pair | None:
    def of(values: Any) -> Any:
        try:
            return values and msgspec.json.decode(_VOLATILE.sub("0", encode(values).decode()))
        except UNDECODED:  # a number such as 1E+5
            return values

    def blank(chat: Chat) -> Chat:
        made = replaced(_contents(chat, lambda text: _VOLATILE.sub("#", text)), tools=of(chat.tools))
        for message in (*made.messages, *([made.answer] if made.answer else [])):
            if "tool_calls" in message:  # a copy, made by _contents
                message["tool_calls"] = of(message["tool_calls"])
        return made

    return blank(ref), blank(row)


def _undo_images(ref: Chat, row: Chat) -> Pair | None:
    def blank(chat: Chat) -> Chat:
        return _contents(
            chat, lambda text: re.sub(r"\x00(\d+):\w+\x00", lambda mark: f"\x00{mark[1]}:{0:016}\x00", text)
        )

    return (blank(ref), blank(row)) if any("\x00" in message["content"] for message in row.messages) else None


def _undo_json(ref: Chat, row: Chat) -> Pair | None:
    def ordered(text: Any) -> Any:
        if isinstance(text, str) and text[:1] in ("{", "["):
            try:
                return _canonical(msgspec.json.decode(text)).decode()
            except UNDECODED:
                return text
        return text if isinstance(text, str) else _canonical(text).decode()

    def of(message: dict[str, Any]) -> dict[str, Any]:
        calls = [
            {**call, "function": {**call["function"], "arguments": ordered(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or ()
        ]
        content = ordered(message["content"]) if message["role"] == "tool" else message["content"]
        return {**message, "content": content, **({"tool_calls": calls} if calls else {})}

    if not any(message["role"] == "tool" or "tool_calls" in message for message in row.messages):
        return None

    def all_of(chat: Chat) -> Chat:
        answer = None if chat.answer is None else of(chat.answer)
        return replaced(chat, messages=[of(message) for message in chat.messages], answer=answer)

    return all_of(ref), all_of(row)


def _undo_spaces(ref: Chat, row: Chat) -> Pair | None:
    def plain(text: str) -> str:
        return " ".join(text.split())

    return _contents(ref, plain), _contents(row, plain)


def _told(ref: Chat, row: Chat) -> list[dict[str, Any]]:
    """Return the messages of a request and its answer, which the next turn may reveal."""
    if ref.answer is not None:
        return [*ref.messages, ref.answer]
    place = len(ref.messages)
    is_next = len(row.messages) > place and row.messages[place]["role"] == "assistant"
    if is_next and _said(row.messages[:place]) == _said(ref.messages):
        return row.messages[: place + 1]
    return ref.messages


def _said(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [(message["role"], message["content"], message.get("tool_calls")) for message in messages]


def _undo_reasoning(ref: Chat, row: Chat) -> Pair | None:
    told = _told(ref, row)
    changed = [
        {**mine, "content": theirs["content"], "reasoning_content": reasoning_of(theirs)}
        if mine["role"] == theirs["role"] == "assistant" and _thought(mine) != _thought(theirs)
        else mine
        for mine, theirs in zip(row.messages, told, strict=False)
    ]
    if changed == row.messages[: len(changed)]:
        return None
    return ref, replaced(row, messages=[*changed, *row.messages[len(changed) :]])


def _thought(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message, which may stand in its content."""
    inline = _INLINE.match(message["content"])
    return (reasoning_of(message) or (inline[1] if inline else "")).strip()


def _undo_shortening(ref: Chat, row: Chat) -> Pair | None:
    """Put back the messages of `ref` that `row` left out, or replaced by a summary."""
    told = _told(ref, row)
    before, mine = _said(told), _said(row.messages)
    for place in range(len(mine)):
        if place < len(before) and mine[place] == before[place]:
            continue
        for other in range(place + 1, len(before)):
            goes_on = other + 1 == len(before) or (place + 1 < len(mine) and mine[place + 1] == before[other + 1])
            if before[other] == mine[place] and goes_on:
                return ref, replaced(row, messages=[*told[:other], *row.messages[place:]])
    return None


def _undo_insertion(ref: Chat, row: Chat) -> Pair | None:
    """Leave out a message that `row` has among those of `ref`."""
    before, mine = _said(_told(ref, row)), _said(row.messages)
    place = next((at for at, pair in enumerate(zip(before, mine, strict=False)) if pair[0] != pair[1]), -1)
    if place < 0 or place + 1 >= len(mine) or mine[place + 1] != before[place]:
        return None
    return ref, replaced(row, messages=[*row.messages[:place], *row.messages[place + 1 :]])


def _undo_order_of_text(ref: Chat, row: Chat) -> Pair | None:
    """Put what two texts end with before what differs."""

    def fronted(one: str, other: str) -> tuple[str, str] | None:
        num = _common(one[::-1], other[::-1])
        if num < 2 * SHOWN_CHARS or num == min(len(one), len(other)):
            return None
        return one[-num:] + one[:-num], other[-num:] + other[:-num]

    if isinstance(row.prompt, str) and isinstance(ref.prompt, str):
        pair = fronted(ref.prompt, row.prompt)
        return None if pair is None else (replaced(ref, prompt=pair[0]), replaced(row, prompt=pair[1]))
    for place, (mine, theirs) in enumerate(zip(row.messages, ref.messages, strict=False)):
        if mine != theirs:
            pair = fronted(theirs["content"], mine["content"]) if mine["role"] == theirs["role"] else None
            if pair is None:
                return None
            made = [list(chat.messages) for chat in (ref, row)]
            for messages, content in zip(made, pair, strict=True):
                messages[place] = {**messages[place], "content": content}
            return replaced(ref, messages=made[0]), replaced(row, messages=made[1])
    return None


def _undo_edits(ref: Chat, row: Chat, *, of_system: bool = False) -> Pair | None:
    """Take from `ref` the messages that differ, of one role, if the conversation goes on as before."""
    told = _told(ref, row)
    changed = list(row.messages)
    for place, (mine, theirs) in enumerate(zip(row.messages, told, strict=False)):
        if mine["role"] != theirs["role"] or (mine["role"] == "system") != of_system or mine == theirs:
            continue
        rest = zip(row.messages[place + 1 :], told[place + 1 :], strict=False)
        if of_system or any(_said([one]) == _said([other]) for one, other in rest):
            changed[place] = theirs
    return None if changed == row.messages else (ref, replaced(row, messages=changed))


def _undo_system(ref: Chat, row: Chat) -> Pair | None:
    return _undo_edits(ref, row, of_system=True)


RULES: tuple[Rule, ...] = (
    Rule("salt", "the prompts have different cache salts, and share nothing",
         "give one cache_salt to all who may share: one per tenant, none per request", _undo_salt),
    Rule("model", "the requests ask for different models or adapters, which share nothing",
         "keep a session on one model", _undo_model),
    Rule("tool order", "the same tools come in another order",
         "sort the tools by name before each request", _undo_order),
    Rule("tool keys", "the same tools are written with their keys in another order",
         "write tools with sorted keys (json.dumps(..., sort_keys=True)), once", _undo_keys),
    Rule("volatile", "a time, a date, an id or a counter stands before text that does not change",
         "put it behind all that stays, such as into the last message, or round it to the day", _undo_volatile),
    Rule("image", "the same place has an image of other data or another URL, such as a signed one",
         "send images as the same bytes or the same URL in each turn, behind the text", _undo_images),
    Rule("tools", "tools were added, removed or edited after the first request",
         "offer the same tools in all turns, or add tools at the end of the list only", _undo_tools),
    Rule("variables", "the template's variables differ, such as thinking or the reasoning effort",
         "keep them the same for a session", _undo_variables),
    Rule("json", "arguments or results of tools are written with other spaces or key orders than before",
         "send calls and results back as the text that they were, or with sorted keys", _undo_json),
    Rule("reasoning left out", "the client does not send back the reasoning that the model generated",
         "send reasoning_content (thinking blocks) of earlier turns back with the messages", _undo_reasoning),
    Rule("spaces", "texts come back with other spaces or line ends than were sent or generated",
         "send messages back unchanged: no strip, no joining of lines", _undo_spaces),
    Rule("shortened", "earlier messages were dropped or summarized: the turn no longer fitted, or tokens were saved",
         "drop rarely and much at once, to half the window, and never the first messages", _undo_shortening),
    Rule("inserted", "a message was put between earlier ones",
         "append new messages behind the last one", _undo_insertion),
    Rule("rewritten", "an earlier message, such as an old result of a tool, was changed",
         "leave earlier messages as they are; shorten a result before it is first sent", _undo_edits),
    Rule("system", "the system message differs",
         "put what stays first, and what differs per session or turn behind it or into the last message",
         _undo_system),
    Rule("text order", "text that stays the same stands behind text that differs",
         "put instructions and examples first, and what differs, such as documents and questions, last",
         _undo_order_of_text),
    Rule("template drops reasoning", "the chat template leaves out reasoning of earlier turns that was in the cache",
         "set the variable of the template that keeps it (preserve_thinking, clear_thinking=false), or edit the line"),
    Rule("template", "the chat template writes earlier messages in another way or place once a turn is added",
         "edit this line, so that a prompt only grows: system message and tools first, marks not by the last message"),
    Rule("block", "tokens in common do not fill a page, or are fewer than one page",
         "a smaller --page-size (vLLM: --block-size), or more text in common"),
    Rule("gone", "the tokens had been sent before, but the usage does not record them as hits: evicted, expired, on "
         "another replica, or still being computed",
         "more memory or a longer cache lifetime, and a router that keeps sessions together"),
    Rule("evicted", "the tokens were in the cache, and were evicted before they were used again",
         "more memory (--pages, --host-memory), or fewer sessions at a time on a replica"),
    Rule("not kept", "windows and states keep only some places of a prefix, and none where this prompt parts",
         "--prefix-cache-retention-interval N (kvarts and vLLM), or --kv-groups all; or longer turns in common"),
    Rule("no state", "states are kept only where prompts and chunks end at a block, and none where this prompt parts",
         "end what prompts share at a multiple of the block, or --prefix-cache-retention-interval N; a third prompt to "
         "part there finds its state"),
    Rule("other name", "the same tokens are on the device under another name: of another cache_salt, adapter or image",
         "give one cache_salt to all who may share, and keep a session on one adapter"),
    Rule("preempted", "pages were taken from running requests, and computed again",
         "fewer sequences at a time (--max-seqs), or more memory"),
)  # fmt: skip
"""The rules, the most specific first."""
OTHERS = ("salt", "model", "tool order", "tool keys", "volatile", "text order")
OF_OTHERS = [rule for rule in RULES if rule.name in OTHERS]
"""Rules for two requests that nothing but their log has in common."""
RULES_BY_NAME = {rule.name: rule for rule in RULES}


_Cause = tuple[str, int, str, list[str]]
"""(rule, tokens that it costs, where, the texts there)"""


class _Partings:
    """Where requests part from the ones before them, and by which rules. Owner of the requests kept to compare."""

    def __init__(self, prompts: Prompts, page_size: int) -> None:
        self._prompts = prompts
        self._page_size = page_size
        self._kept: OrderedDict[int, Chat] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._num_chars = 0
        self._last: dict[object, int] = {}
        self._row = -1
        self._found: list[tuple[int, int, list[_Cause]]] = []
        """(row, tokens shared with its reference, what it misses)"""
        self._num_recorded = 0
        self._recorded = 0

    @property
    def recorded(self) -> int | None:
        """Tokens that usage records as hits; None if none of it does."""
        return self._recorded if self._num_recorded else None

    @property
    def dated(self) -> int | None:
        """The line of the template that writes the date; None without one."""
        return None if self._prompts.template is None else self._prompts.template.dated_line

    def add(self, chat: Chat, units: bytes, before: int) -> None:
        """Compare a request with an earlier one, and keep it. `before`: the row of the turn before it, or -1."""
        self._row += 1
        names = _names_of(chat)
        places = [(False, before), *((name == "any", self._last.get(name, -1)) for name in names)]
        is_other, ref = next(((far, self._kept[at]) for far, at in places if at in self._kept), (True, None))
        if chat.cached_tokens is not None:
            self._num_recorded += 1
            self._recorded += chat.cached_tokens
        if ref is not None and isinstance(chat.prompt, list) == isinstance(ref.prompt, list):
            self._compare(ref, chat, OF_OTHERS if is_other else RULES)
        for name in names:
            self._last[name] = self._row
        size = 2000 + sum(len(message["content"]) for message in chat.messages)
        size += len(chat.prompt or ()) * (1 if isinstance(chat.prompt, str) else ID_CHARS)
        self._kept[self._row], self._sizes[self._row] = chat, size
        self._num_chars += size
        while self._num_chars > KEPT_CHARS and len(self._kept) > 1:
            gone, _ = self._kept.popitem(last=False)
            self._num_chars -= self._sizes.pop(gone)

    def count(self, hits: Mapping[int, int], losses: dict[str, Loss]) -> None:
        """Add what the rules cost to `losses`. `hits`: tokens that each row finds in any earlier request."""
        for row, shared, causes in self._found:
            if row not in hits:
                continue  # left out
            reached, at = max(hits[row], shared // self._page_size * self._page_size), shared
            for name, tokens, where, shows in causes:
                left = tokens
                if name not in ("block", "gone"):
                    left = max(0, min(tokens, at + tokens - reached))
                    at += tokens
                if left >= LEAST_TOKENS or (name == "block" and left > 0):
                    _add(losses, name, left, where, shows)

    def _compare(self, ref: Chat, row: Chat, rules: Sequence[Rule]) -> None:
        original = ref, row
        causes: list[_Cause] = []
        size, texts = self._page_size, ("", "")
        if isinstance(row.prompt, list) and isinstance(ref.prompt, list):
            pairs = zip(row.prompt, ref.prompt, strict=False)
            shared = first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            limit = len(row.prompt) - 1
        else:
            texts = self._texts(ref, row)
            shared = first = self._shared(ref, row, *texts)
            limit = self._prompts.count(texts[1]) - 1
        if not _is_prefix(*texts) or (ref.salt, ref.model) != (row.salt, row.model):
            tried = set()
            for _ in range(MOST_CAUSES):
                left = [rule for rule in rules if rule.name not in tried]
                if not _is_at_volatile(*texts):
                    left = [rule for rule in left if rule.name != "volatile"]
                gains = [(rule.name, *found) for rule in left if (found := self._gain(rule, ref, row, shared))]
                if not gains:
                    break
                most = max(gain for _, gain, _ in gains)
                name, gain, pair = next(each for each in gains if each[1] >= NEARLY * most)
                causes.append((name, gain, *self._where(name, *original)))
                tried.add(name)
                shared += gain
                ref, row = pair
                texts = self._texts(ref, row)
                if name.startswith("template"):
                    break
        rest = min(first, limit) % size
        if rest and (rules is RULES or first >= 2 * PAGE_SIZE):  # others have words of a template in common
            where = f"{_place(original[1])} shares {first:,} tokens with {_place(original[0])}"
            causes.append(("block", rest, where, []))
        self._was_gone(*original, min(first, limit) // size * size, causes)
        if causes:
            self._found.append((self._row, first, causes))

    def _was_gone(self, ref: Chat, row: Chat, found: int, causes: list[_Cause]) -> None:
        """Add what was in the cache once, and is not a hit by the usage."""
        if row.cached_tokens is None or not row.num_prompt_tokens:
            return
        scale = row.num_prompt_tokens / max(1, self._prompts.ids_of(row).num_tokens)
        lost = round(found - row.cached_tokens / scale)
        if lost < max(self._page_size, found // 5):
            return
        ago = ""
        if row.time_ns is not None and ref.time_ns is not None:
            ago = f", {(row.time_ns - ref.time_ns) / 60e9:,.1f} minutes after it"
        where = f"{_place(row)} records {row.cached_tokens:,} hits of what {_place(ref)} sent{ago}"
        causes.append(("gone", lost, where, []))

    def _gain(self, rule: Rule, ref: Chat, row: Chat, shared: int) -> tuple[int, Pair] | None:
        """Return how many tokens two requests share more without the difference of a rule, and the requests then."""
        if rule.undo is None:
            return self._gain_of_template(rule, ref, row, shared) if rule.name.startswith("template") else None
        pair = rule.undo(ref, row)
        if pair is None:
            return None
        gain = self._shared(*pair, *self._texts(*pair)) - shared
        return (gain, pair) if gain >= LEAST_TOKENS else None

    def _gain_of_template(self, rule: Rule, ref: Chat, row: Chat, shared: int) -> tuple[int, Pair] | None:
        if self._prompts.template is None or (ref.tools, ref.variables) != (row.tools, row.variables):
            return None
        told = _told(ref, row)
        num = min(len(told), len(row.messages))
        if num < len(ref.messages) or _said(told[:num]) != _said(row.messages[:num]):
            return None
        drops = self._drops_reasoning(ref, row, told)
        if drops != (rule.name == "template drops reasoning"):
            return None
        gain = min(map(self._prompts.count, self._texts(ref, row))) - shared
        return (gain, (ref, row)) if gain >= LEAST_TOKENS else None

    def _drops_reasoning(self, ref: Chat, row: Chat, told: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the prompts part at reasoning: `ref` has one there that `row` has not."""
        before, mine = self._texts(ref, row)
        return any(
            (reasoning := _thought(message)) and before.count(reasoning) > mine.count(reasoning) for message in told
        )

    def _texts(self, ref: Chat, row: Chat) -> tuple[str, str]:
        """Return the texts of `ref` with its answer and of the prompt of `row`."""
        told = _told(ref, row)
        parts = self._prompts.parts(ref)
        if ref.prompt is None and len(told) > len(ref.messages):
            parts = self._prompts.answered(ref, told[-1])
        elif ref.answer is not None:
            parts = self._prompts.answered(ref, ref.answer)
        return "".join(parts), "".join(self._prompts.parts(row))

    def _shared(self, ref: Chat, row: Chat, before: str, mine: str) -> int:
        """Return the number of tokens with which both begin."""
        if (ref.salt, ref.model) != (row.salt, row.model):
            return 0
        return self._prompts.count(mine[: _common(before, mine)])

    def _where(self, name: str, ref: Chat, row: Chat) -> tuple[str, list[str]]:
        """Return where two requests part, for people, and the texts there."""
        text = f"{_place(row)} parts from {_place(ref)}"
        if name.startswith("template"):
            at = _common(*self._texts(ref, row))
            lines = [[line for place, line in self._prompts.lines_of(chat) if place <= at][-1:] for chat in (row, ref)]
            named = " and ".join(f"line {line}" for line in dict.fromkeys(line for each in lines for line in each))
            return f"{text} in what {named or 'the end'} of the template writes", _both(*self._texts(ref, row), at)
        if name in ("tool order", "tool keys", "tools"):
            return f"{text} in {_tool_where(ref, row)}", []
        if name in ("salt", "model", "variables"):
            key = {"salt": "cache_salt", "variables": "chat_template_kwargs"}.get(name, name)
            return f"{text} in {key}: {_short(getattr(row, name))}, before {_short(getattr(ref, name))}", []
        for place, (said, before) in enumerate(zip(row.messages, _told(ref, row), strict=False)):
            if said != before:
                one, other = _spelled(before), _spelled(said)
                at = _common(one, other)
                line = other.count("\n", 0, at) + 1
                return f"{text} in messages[{place}] ({said['role']}), line {line}", _both(one, other, at)
        if isinstance(row.prompt, str) and isinstance(ref.prompt, str):
            at = _common(ref.prompt, row.prompt)
            return f"{text} in prompt, line {row.prompt.count(chr(10), 0, at) + 1}", _both(ref.prompt, row.prompt, at)
        return (f"{text} in {_tool_where(ref, row)}" if row.tools != ref.tools else text), []


def _tool_where(ref: Chat, row: Chat) -> str:
    """Return where the tools of two requests part, for people."""
    now, then = row.tools or [], ref.tools or []
    pairs = enumerate(zip(map(encode, now), map(encode, then), strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(now), len(then)))
    tool = now[at].get("function", now[at]).get("name") if at < len(now) else "the end"
    return f"tools[{at}] ({in_line(str(tool))[:SHOWN_CHARS]})"


def _names_of(chat: Chat) -> list[object]:
    """Return the groups of a request, the narrowest first: later ones of a group should begin as it does."""
    user = next((message["content"] for message in chat.messages if message["role"] == "user"), None)
    system = next((message["content"] for message in chat.messages if message["role"] == "system"), None)
    names: list[object] = []
    if chat.session is not None:
        names.append(("session", chat.session))
    if user and len(chat.messages) > 1:
        names.append(("question", _digest(user)))
    if chat.tools:
        named = sorted(str(tool.get("function", tool).get("name")) for tool in chat.tools)
        names.append(("tools", _digest("\n".join(named))))
    if system:
        names.append(("system", _digest(_VOLATILE.sub("#", system)[:80])))
    if isinstance(chat.prompt, str):
        names.append(("prompt", _digest(_VOLATILE.sub("#", chat.prompt[:80]))))
    return [*names, "any"]


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).digest()


def _spelled(message: Mapping[str, Any]) -> str:
    calls = encode(message["tool_calls"]).decode() if "tool_calls" in message else ""
    return f"{reasoning_of(message)}{message['content']}{calls}"


def _common(one: str, other: str) -> int:
    """Return the number of characters with which two texts begin, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_prefix(one: str, other: str) -> bool:
    return _common(one, other) == min(len(one), len(other))


def _is_at_volatile(one: str, other: str) -> bool:
    """Return whether two texts part in, or right at, a time, an id or a number."""
    at = _common(one, other)
    found = _VOLATILE.finditer(other, max(0, at - 2 * SHOWN_CHARS), at + 2 * SHOWN_CHARS)
    return any(match.start() <= at <= match.end() for match in found)


def _place(chat: Chat) -> str:
    return f"{in_line(Path(chat.file).name)}:{chat.line}"


def _both(before: str, mine: str, at: int) -> list[str]:
    start = max(0, at - SHOWN_CHARS // 2)
    return [_short(mine[start : start + SHOWN_CHARS]), f"before: {_short(before[start : start + SHOWN_CHARS])}"]


def _short(value: Any) -> str:
    return repr(value)[: 2 * SHOWN_CHARS]
