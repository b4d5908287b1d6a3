"""Prompts of conversations of which only lengths are recorded, inferred from these and from cache reads.

Each request sends the whole conversation, so a prompt at least as long as the previous prompt and its answer begins
with both, and one at least as long as the previous prompt begins with that. A shorter one, after a compaction, begins
with as many tokens of it as were read from the cache. The first prompt of a conversation begins with as many tokens
shared by all with its model. Dependencies between requests are inferred from the times, see `sim/traffic/graph.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvarts.core.hints import Hints
from kvarts.sim.traffic.graph import RecordedTimes, linked
from kvarts.sim.traffic.trace_request import After, TraceRequest

__all__ = ["INFERRED", "Call", "bound_placeholders", "inferred_requests"]

COMMON = 1 << 60
"""First id of tokens that sessions share, 2**40 per model; ids of single sessions are below."""
CHAIN_BITS = 36
INFERRED = (
    "the files do not identify prefixes that prompts share: these are inferred from their lengths and from cache reads"
)


class Call(msgspec.Struct):
    """One request. `num_read_tokens`: of its prompt, read from a cache.

    `chain`: the session, the sub-agent or "", and the model. `tool`: what the client runs after the answer.
    `is_placeholder`: the length of its answer is only that of the beginning of a stream.
    """

    start_ns: int
    end_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_read_tokens: int
    chain: tuple[str, str, str]
    tool: str | None = None
    is_placeholder: bool = False


def bound_placeholders(calls: list[Call]) -> list[str]:
    """Replace placeholders of answers' lengths by what the next prompt adds, an upper bound; return warnings."""
    calls.sort(key=lambda call: call.start_ns)
    following: dict[tuple[str, str, str], Call] = {}
    num_bounded = num_kept = 0
    for call in reversed(calls):
        next_call, following[call.chain] = following.get(call.chain), call
        if not call.is_placeholder:
            continue
        growth = 0 if next_call is None else next_call.num_prompt_tokens - call.num_prompt_tokens
        if growth > call.num_output_tokens:
            call.num_output_tokens = growth
            num_bounded += 1
        else:
            num_kept += 1
    if not num_bounded and not num_kept:
        return []
    text = (
        f"answers of which only the length of a stream's beginning is recorded: {num_bounded:,} taken to be what the "
        f"next prompt adds, an upper bound, and {num_kept:,} that no next prompt bounds, and which are longer"
    )
    return [text]


def inferred_requests(calls: list[Call]) -> list[TraceRequest]:
    """Return the requests of all sessions, with their dependencies and the shared beginnings of their prompts."""
    calls.sort(key=lambda call: call.start_ns)
    chains: dict[tuple[str, str, str], list[int]] = {}
    for row, call in enumerate(calls):
        chains.setdefault(call.chain, []).append(row)
    contents: dict[int, tuple[tuple[range, ...], range]] = {}
    models: dict[tuple[str, bool], int] = {}
    for number, ((_, agent, model), rows) in enumerate(chains.items()):
        common = COMMON + (models.setdefault((model, bool(agent)), len(models)) << 40)
        contents.update(zip(rows, _contents([calls[row] for row in rows], number, common), strict=True))
    names, waits = _linked(calls, chains)
    requests = []
    for row, call in enumerate(calls):
        prompt, answer = contents[row]
        after = waits.get(row, ())
        requests.append(
            TraceRequest(
                row,
                call.start_ns,
                prompt,
                call.num_prompt_tokens,
                len(answer),
                output_units=(answer,),
                session_id=names[call.chain],
                delay_ns=0 if after else None,
                after=after,
                hints=None if call.tool is None else Hints(tool=call.tool),
            )
        )
    return requests


def _linked(
    calls: list[Call], chains: dict[tuple[str, str, str], list[int]]
) -> tuple[dict[tuple[str, str, str], str], dict[int, tuple[After, ...]]]:
    """Return the name of each chain, and the dependencies of requests; a session's longest main chain is its parent."""
    sessions: dict[str, list[tuple[str, str, str]]] = {}
    for chain in chains:
        sessions.setdefault(chain[0], []).append(chain)
    names, waits = {}, {}
    for session, of_session in sessions.items():
        recorded = {
            chain: [RecordedTimes(row, calls[row].start_ns, calls[row].end_ns) for row in chains[chain]]
            for chain in of_session
        }
        main = max(of_session, key=lambda chain: (not chain[1], len(chains[chain])))
        for chain in of_session:
            names[chain] = session if chain is main else "/".join(part for part in chain if part)
        waits.update(linked(recorded.pop(main), recorded.values()))
    return names, waits


def _contents(calls: list[Call], number: int, common: int) -> Iterator[tuple[tuple[range, ...], range]]:
    """Yield the tokens of each prompt and of its answer, for consecutive requests of one chain.

    New tokens of a chain are numbered consecutively, so a growing conversation is a single range.
    """
    next_token = number << CHAIN_BITS
    before: tuple[range, ...] = ()
    num_before, num_with_answer = 0, 0
    for place, call in enumerate(calls):
        num_prompt = call.num_prompt_tokens
        num_read = min(call.num_read_tokens, num_prompt)
        shared: tuple[range, ...]
        if not place:
            shared = (range(common, common + num_read),) if num_read else ()
        elif num_prompt >= num_with_answer:
            shared = before
        else:
            shared = _first(before, num_before if num_prompt >= num_before else num_read)
        num_shared = sum(map(len, shared))
        num_new = num_prompt - num_shared
        prompt = _joined(shared, range(next_token, next_token + num_new))
        next_token += num_new
        answer = range(next_token, next_token + call.num_output_tokens)
        next_token = answer.stop
        before, num_before, num_with_answer = _joined(prompt, answer), num_prompt, num_prompt + len(answer)
        yield prompt, answer


def _first(runs: tuple[range, ...], count: int) -> tuple[range, ...]:
    """Return the first `count` tokens of `runs`, or all if there are fewer."""
    first = []
    for run in runs:
        if count <= 0:
            break
        first.append(run[:count])
        count -= len(run)
    return tuple(first)


def _joined(runs: tuple[range, ...], more: range) -> tuple[range, ...]:
    if not more:
        return runs
    if runs and runs[-1].stop == more.start:
        return (*runs[:-1], range(runs[-1].start, more.stop))
    return (*runs, more)
