"""How many users fit: sessions of a trace as a closed loop, with the client's delays between turns.

Each user is in one session at a time; when it ends, the user begins the next session of the trace. If there are more
users than sessions, the trace is repeated, as sessions that share nothing with the first copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Inquiry, Processes
from kvarts.base.units import as_hits, as_percent
from kvarts.plan.cache import CachePlan
from kvarts.plan.commands import CommandLines
from kvarts.plan.confidence import (
    EIGHTHS,
    SLO_SHARE,
    Goal,
    find_confidence,
    how_long,
    shares_of_agents,
    step_times,
    would_change,
)
from kvarts.plan.planning import Plan, prices_of
from kvarts.plan.purchases import (
    Prices,
    Purchase,
    between,
    devices_of,
    given_host_bytes,
    given_policy,
    host_memory_of,
    host_sizes,
    policies_of,
    with_host_memory,
    with_memory,
)
from kvarts.plan.replays import NO_CHANGE, UNSEEN, PlanProgress, changed_trace, guesses, share_kept
from kvarts.plan.serve_lines import serve_lines
from kvarts.plan.tables import answer_for_users
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one, trace_of
from kvarts.sim.report.words import plus_minus
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.editing import can_lengthen, repeated, share_of_agents
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.trials import WORTHWHILE

if TYPE_CHECKING:
    from kvarts.sim.replay import Traffic

__all__ = ["UsersPlan", "plan_users"]

ROUTERS = ("prefix", "session")
EMPTY: Mapping[str, Any] = MappingProxyType({})
MS_PER_HOUR = 3.6e6
NUM_SEARCH, NUM_HOST, NUM_OPTIONS, NUM_CONFIDENCE, NUM_SENSITIVITY = 6, 12, 4, 5, 12
"""Replays of each stage, about."""

Found = TypeVar("Found")
_Task = tuple[int, ReplayConfig, float, float]
"""Users, how their sessions are replayed, the factor on lengths of prompts, and the share of agents or NO_CHANGE."""


class _Load(msgspec.Struct, frozen=True, order=True):
    """Users, with host memory per device in addition to that of the configuration, and what else differs from it."""

    host_bytes: int
    policy: str
    users: int
    pages: int = 0
    """0: those of the configuration."""
    cost_factor: float = 1.0
    length: float = 1.0
    agents: float = NO_CHANGE

    @property
    def is_usual(self) -> bool:
        """Whether nothing but the host memory differs."""
        return self == _Load(self.host_bytes, self.policy, self.users)


class UsersPlan:
    """Search for the most `users`, between two numbers, with which enough requests keep the SLO of `config`.

    `commands`: builds the command lines of points. `workers`: processes that replay.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        users: tuple[int, int],
        goal: Goal,
        *,
        commands: CommandLines | None = None,
        workers: int | None = 1,
        progress: PlanProgress = UNSEEN,
    ) -> None:
        if not trace.has_sessions:
            raise ConfigError("a user needs sessions, and the trace has none", field="users")
        self._trace = trace
        self._config = config
        self._low, self._high = users
        self._commands = commands or CommandLines()
        self._goal = goal
        self._slo_share = goal.slo_share
        self._cost_error = goal.error(config, trace)
        self._prices = goal.prices
        self._progress = progress
        self._num_sessions = num_sessions(trace)
        self._has_slo = any(getattr(config.slo, field) is not None for field in config.slo.__struct_fields__)
        self._processes = Processes(workers, trace)
        self._found: dict[_Load, dict[str, Any]] = {}
        """The summaries of replays."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the replays, the most users that keep the SLO, and the fewest found that do not, JSON-able.

        If a limit was found, `host` repeats the search with as much host memory as the trace can use, under each store
        policy of the engine, and then has the least with which as many fit. It contains `memory_bytes` per device,
        `policy`, and `hit_ratio` at the failing number of users, compared with `hit_ratio_without` host memory and
        `most_hit_ratio` with all of it. It is null if host memory gains nothing or cannot be added. `options`
        are replays of the failing number of users, each with one more option: an eviction policy, a router, or KV that
        is pinned between turns. `answers`: with and without host memory, the cheapest per user first.
        """
        found: dict[str, Any] = {"fits": None, "fails_at": None, "host": None, "options": []}
        found |= {"confidence": None, "sensitivity": {}, "answers": []}
        is_complete = True
        with self._processes:
            try:
                self._search_through(found)
            except KeyboardInterrupt:
                if not self._found:
                    raise
                is_complete = False
                if found["fits"] is None and found["fails_at"] is None:
                    found |= self._bracket()
            if not found["answers"]:
                found["answers"] = self._answers(found)
        return {**self._facts, **found, "points": self._points(), "is_complete": is_complete}

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "slo": {name: getattr(self._config.slo, name) for name in self._config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "num_sessions": self._num_sessions,
            "num_devices": self._num_devices,
            "is_on_device": self._config.placement is not None,
            "prices": self._goal.prices_to_builtins(),
        }

    def _search_through(self, found: dict[str, Any]) -> None:
        """Put the results of searches into `found`, one after the other."""
        if not self._has_slo:
            loads = [_Load(0, "", users) for users in sorted({self._low, (self._low + self._high) // 2, self._high})]
            self._asked(lambda asked: asked.all(loads))
            return
        left = NUM_SEARCH + NUM_HOST + NUM_OPTIONS + NUM_CONFIDENCE + NUM_SENSITIVITY * (not self._goal.is_quick)
        self._progress.on_answer("", left)
        fits, fails = self._search(_Load(0, "", self._low))
        found |= {"fits": fits, "fails_at": fails}
        self._tell(found, left := left - NUM_SEARCH)
        if fails is not None:
            found["host"] = self._host(fits, fails)
            self._tell(found, left := left - NUM_HOST)
            found["options"] = self._options(fails)
        answers = self._answers(found)
        self._tell(found, left - NUM_OPTIONS)
        for answer in answers:
            load = _Load(answer["host_bytes"], answer["policy"] or "", answer["users"])
            answer["confidence"] = self._confidence(load)
        if answers:
            found |= {"answers": answers, "confidence": answers[0]["confidence"]}
            self._tell(found, NUM_SENSITIVITY * (not self._goal.is_quick))
            self._find_sensitivity(answers[0], found["sensitivity"])
            answers[0]["would_change"] = would_change(found["sensitivity"])

    def _tell(self, found: Mapping[str, Any], num_left: int) -> None:
        """Report the answer so far."""
        answers = found["answers"] or self._answers(found)
        text = answer_for_users({**self._facts, **found, "answers": answers, "points": self._points()})
        self._progress.on_answer(text.partition(". ")[0], num_left)

    def _bracket(self) -> dict[str, Any]:
        """Return the most users so far that keep the SLO, and the fewest above them that do not."""
        kept = {
            load.users: self._keeps(summary)
            for load, summary in self._found.items()
            if load.is_usual and not load.host_bytes and self._has_slo
        }
        fits = max((users for users, keeps in kept.items() if keeps), default=None)
        missed = (users for users, keeps in kept.items() if not keeps and users > (fits or 0))
        return {"fits": fits, "fails_at": min(missed, default=None)}

    def _keeps(self, summary: dict[str, Any]) -> bool:
        return (share_kept(summary) or 0.0) >= self._slo_share

    def _options(self, users: int) -> list[dict[str, Any]]:
        """Return a replay for each option that the configuration does not have, with the `option`."""
        config = self._config
        more: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        if "orders" not in config.features:
            more["--eviction auto"] = {"eviction": "auto"}, {"eviction": "auto"}
        if config.replicas > 1:
            for router in ROUTERS:
                if router != config.router:
                    more[f"--router {router}"] = {"router": router}, {"router": router}
        if config.sessions is None:
            pinned = SessionReplay(retention="pin")
            more["--set sessions.retention=pin"] = {"sessions": pinned}, {"sessions.retention": "pin"}
        tasks: dict[str, _Task] = {}
        for option, (fields, _) in more.items():
            with suppress(ConfigError):  # the rest of the configuration cannot have it
                tasks[option] = users, self._config_of(users, fields), 1.0, NO_CHANGE
        found = dict(self._processes.results(_summary_or_none, tasks))
        rows = []
        for option, (_, settings) in more.items():
            self._progress.on_replay()
            if found.get(option) is not None:
                rows.append({"option": option, **self._row(_Load(0, "", users), found[option], settings)})
        return rows

    # Confidence and sensitivity --------------------------------------------------------------------------------

    def _confidence(self, load: _Load) -> dict[str, Any]:
        """Return the confidence in users that keep the SLO."""

        def search(asked: Inquiry[_Load]) -> dict[str, Any]:
            def replayed(factor: float) -> tuple[bool, float]:
                summary = asked(msgspec.structs.replace(load, cost_factor=factor))
                return self._keeps(summary), float(summary["goodput"].get("requests_per_s") or 0.0)

            return find_confidence(replayed, self._config.cost, self._cost_error)

        return self._asked(search)

    def _find_sensitivity(self, answer: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Find how far step times, memory and the sessions may differ before an answer changes."""
        load = _Load(answer["host_bytes"], answer["policy"] or "", answer["users"])
        found["step_times"] = step_times(answer["confidence"])
        if self._goal.is_quick:
            return
        share_of_trace = share_of_agents(self._trace)

        def share(asked: Inquiry[_Load], **changes: float) -> float:
            return share_kept(asked(msgspec.structs.replace(load, **changes))) or 0.0

        if not load.host_bytes and not given_host_bytes(self._config):
            found["memory"] = {"share": self._asked(partial(self._spare, load)).pages / self._config.num_pages}
        if self._trace.knows_prefixes:
            found["hit_ratio"] = self._hits(load.users)
        if can_lengthen(self._trace):
            found["prompt_length"] = self._asked(lambda asked: how_long(partial(share, asked), self._slo_share))
        found["agents"] = self._asked(
            lambda asked: shares_of_agents(partial(share, asked), self._slo_share, share_of_trace)
        )

    def _spare(self, load: _Load, asked: Inquiry[_Load]) -> _Load:
        """Return the load with the fewest eighths of the pages that keep the SLO."""
        most = self._config.num_pages
        sizes = sorted({max(1, most * eighth // EIGHTHS) for eighth in range(1, EIGHTHS)})
        loads = [*(msgspec.structs.replace(load, pages=pages) for pages in sizes), load]
        least = loads[between(lambda place: self._keeps(asked(loads[place])), -1, len(loads) - 1)]
        return msgspec.structs.replace(least, pages=least.pages or most)

    def _hits(self, users: int) -> dict[str, Any]:
        """Return the lowest hit ratio of replays of `users` that keep the SLO, and the highest below that does not."""
        usual = {load: summary for load, summary in self._found.items() if load.users == users}
        same = [
            (summary["prefix_hit_ratio"] or 0.0, self._keeps(summary))
            for load, summary in usual.items()
            if msgspec.structs.replace(load, pages=0).is_usual
        ]
        down_to = min(hits for hits, keeps in same if keeps)
        missed = (hits for hits, keeps in same if not keeps and hits < down_to)
        return {"down_to": down_to, "fails_at": max(missed, default=None)}

    # Answers ---------------------------------------------------------------------------------------------------

    def _answers(self, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return how many users fit, without host memory and with it, the cheapest per user first."""
        loads = [] if found["fits"] is None else [_Load(0, "", found["fits"])]
        host = found["host"]
        if host is not None and host["fits"] is not None:
            loads.append(_Load(host["memory_bytes"], host["policy"], host["fits"]))
        return sorted((self._answer(load) for load in loads), key=lambda answer: answer["price_per_user_hour"])

    def _answer(self, load: _Load) -> dict[str, Any]:
        """Return one way to serve users, JSON-able; its confidence is found later."""
        summary = self._found[load]
        row = self._row(load, summary)
        config = self._config
        spread = summary.get("uncertainty") or {}
        ttft, tpot = (
            plus_minus(row[metric]["p99"], (spread.get(metric) or {}).get("p99")) for metric in ("ttft_ms", "tpot_ms")
        )
        kept, each = as_percent(row["slo_ratio"], bound=self._slo_share), 1000 * row["device_hours"]
        noun, per_user, per_1000 = self._noun, self._num_devices / load.users, each / max(1, row["num_completed"])
        return {
            "name": "with host memory" if load.host_bytes else "users",
            "what": f"{load.users:,} user{'s' * (load.users != 1)} on {self._named(load)}",
            "named": self._named(load),
            "users": load.users,
            "num_devices": self._num_devices,
            "host_bytes": load.host_bytes,
            "policy": load.policy or None,
            **{name: row[name] for name in PRICED},
            **{name: row[name] for name in ("hit_ratio", "device_hours", "slo_ratio", "limited_by", "command")},
            "ttft_ms_p99": row["ttft_ms"]["p99"],
            "tpot_ms_p99": row["tpot_ms"]["p99"],
            "keeps_slo": True,
            "confidence": None,
            "notes": [
                f"{as_hits(row['hit_ratio'])} hits, TTFT p99 {ttft}, TPOT p99 {tpot}; SLO kept by {kept}",
                f"{per_user:.2f} {noun}s a user, {per_1000:.2f} {noun} hours per 1,000 requests",
            ],
            "would_change": [],
            "serve": serve_lines(config, {"host_bytes": load.host_bytes, "policy": load.policy or None}),
        }

    @property
    def _noun(self) -> str:
        return "replica" if self._config.placement is None else "GPU"

    def _named(self, load: _Load) -> str:
        """Return what serves a load, in words: `1 GPU and 96 GiB of host memory (lazy stores)`."""
        text = f"{self._num_devices:,} {self._noun}{'s' * (self._num_devices != 1)}"
        if given := given_host_bytes(self._config):
            return text + host_memory_of(self._num_devices * given, given_policy(self._config))
        return text + host_memory_of(self._num_devices * load.host_bytes, load.policy)

    @property
    def _num_devices(self) -> int:
        return devices_of(self._config) * self._config.replicas

    # Replays ---------------------------------------------------------------------------------------------------

    def _host(self, fits: int | None, fails: int) -> dict[str, Any] | None:
        """Return the most users that fit with all host memory that is tried, and the least memory for as many.

        None if host memory gains no hits for `fails` users.
        """
        config = self._config_of(fails, {})
        if any(config.tiers.values()) or not self._trace.knows_prefixes or not (policies := policies_of(config)):
            return None
        reused_pages = CachePlan(self._trace, config.page_size).curve.most_pages * self._copies_for(fails)
        if not (sizes := host_sizes(config, reused_pages)):
            return None
        without = self._found[_Load(0, "", fails)]["prefix_hit_ratio"] or 0.0
        most_hits = {policy: self._asked(partial(_hits_of, _Load(sizes[-1], policy, fails))) for policy in policies}
        able = [policy for policy in policies if most_hits[policy] - without >= WORTHWHILE]
        if not able:
            return None
        found = {policy: self._search(_Load(sizes[-1], policy, fits or self._low)) for policy in able}
        num_bytes, policy = sizes[-1], max(able, key=lambda each: found[each][0] or 0)
        more, fails_at = found[policy]
        if more is not None:
            limit = self._prices.of(self._num_devices, num_bytes)
            for bought in self._asked(partial(self._least_for, more, sizes, policies, limit))[-1:]:
                num_bytes, policy = bought.host_bytes, bought.policy
        return {
            "memory_bytes": num_bytes,
            "policy": policy,
            "hit_ratio_without": without,
            "hit_ratio": self._asked(partial(_hits_of, _Load(num_bytes, policy, fails))),
            "most_hit_ratio": max(most_hits.values()),
            "fits": more,
            "fails_at": fails_at,
            "points": self._points(num_bytes, policy),
        }

    def _least_for(
        self, users: int, sizes: Sequence[int], policies: Sequence[str], limit: float, asked: Inquiry[_Load]
    ) -> list[Purchase]:
        """Return purchases of host memory for less than `limit` with which so many users keep the SLO."""

        def lacks(bought: Purchase) -> float:
            return self._slo_share - (share_kept(asked(_Load(bought.host_bytes, bought.policy, users))) or 0.0)

        return with_host_memory([[Purchase(self._num_devices)]], sizes, policies, self._prices, lacks, limit)

    def _points(self, host_bytes: int = 0, policy: str = "") -> list[dict[str, Any]]:
        return [
            self._row(load, self._found[load])
            for load in sorted(self._found)
            if load == _Load(host_bytes, policy, load.users)
        ]

    def _search(self, first: _Load) -> tuple[int | None, int | None]:
        """Return the last number that keeps the SLO and the first that does not; None if not found."""
        return self._asked(lambda asked: self._bisected(asked, first))

    def _bisected(self, asked: Inquiry[_Load], first: _Load) -> tuple[int | None, int | None]:
        """Start by doubling from the users of `first`, since replays with many users are slow, then bisect."""

        def keeps(users: int) -> bool:
            return self._keeps(asked(msgspec.structs.replace(first, users=users)))

        users = first.users
        low, high = None, None
        while high is None:
            if keeps(users):
                low = users
                if users == self._high:
                    return low, None
                users = min(self._high, users * 2)
            else:
                high = users
        if low is None:
            return None, high
        while high - low > 1:
            middle = (low + high) // 2
            if keeps(middle):
                low = middle
            else:
                high = middle
        return low, high

    def _asked(self, search: Callable[[Inquiry[_Load]], Found]) -> Found:
        return self._processes.searched(
            search, _summary, self._task_of, _guess, found=self._found, on_ask=self._progress.on_replay
        )

    def _copies_for(self, users: int) -> int:
        """Return the number of copies of the trace that have a session for each of `users`."""
        return -(-users // self._num_sessions)

    def _config_of(self, users: int, fields: Mapping[str, Any]) -> ReplayConfig:
        return msgspec.structs.replace(self._config, concurrency=users, speedup=1.0, **fields).certain

    def _task_of(self, load: _Load) -> _Task:
        fields: dict[str, Any] = {"cost_factor": self._config.cost_factor * load.cost_factor}
        if load.pages:
            fields["num_pages"] = load.pages
        config = self._config_of(load.users, fields)
        if load.host_bytes:
            config = with_memory(config, load.host_bytes, load.policy)
        return load.users, config, load.length, load.agents

    def _row(self, load: _Load, summary: dict[str, Any], settings: Mapping[str, Any] = EMPTY) -> dict[str, Any]:
        hours = summary["duration_ms"] / MS_PER_HOUR
        price = self._prices.of(self._num_devices, given_host_bytes(self._config) or load.host_bytes)
        num_tokens = summary["num_input_tokens"] + summary["num_output_tokens"]
        return {
            "users": load.users,
            "hit_ratio": summary["prefix_hit_ratio"],
            **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
            "request_throughput_per_s": summary["request_throughput_per_s"],
            "device_hours": hours * self._num_devices,
            "price_per_hour": price,
            "price_per_user_hour": price / load.users,
            "price_per_million_tokens": price * hours / (num_tokens / 1e6) if num_tokens else None,
            "num_completed": summary["num_completed"],
            "slo_ratio": share_kept(summary),
            "num_rejected": summary["num_rejected"],
            "limited_by": summary["limited_by"]["cause"],
            "command": self._commands.users_replay(
                load.users, self._copies_for(load.users), load.host_bytes, load.policy, settings
            ),
        }


PRICED = ("price_per_hour", "price_per_user_hour", "price_per_million_tokens")


def plan_users(
    traffic: Traffic,
    config: ReplayConfig,
    users: tuple[int, int],
    *,
    slo_share: float = SLO_SHARE,
    cost_error: float | None = None,
    prices: Prices | Path | str | None = None,
    quick: bool = False,
    commands: CommandLines | None = None,
    workers: int | None = 1,
    progress: PlanProgress = UNSEEN,
) -> Plan:
    """Search for the most `users`, between two numbers, that keep the SLO of `config`, as `kvarts plan users` does.

    The arguments are those of `kvarts.plan`. Raise ConfigError for a trace without sessions.
    """
    goal = Goal(slo_share, cost_error, prices_of(prices, config.cost), quick)
    trace = trace_of(traffic)
    found = UsersPlan(trace, config, users, goal, commands=commands, workers=workers, progress=progress).to_builtins()
    return Plan.of_replays(trace, config, answer_for_users(found), users=found)


def num_sessions(trace: Trace) -> int:
    """Return the number of sessions; a request outside of one counts as one."""
    return len({request.session_id or request for request in trace})


def _hits_of(load: _Load, asked: Inquiry[_Load]) -> float:
    return asked(load)["prefix_hit_ratio"] or 0.0


# Tasks, which also run in other processes


def _summary(trace: Trace, task: _Task) -> dict[str, Any]:
    users, config, length, agents = task
    changed = changed_trace(trace, length, agents)
    copies = -(-users // num_sessions(changed))
    return replay_one(changed if copies == 1 else repeated(changed, copies), config).summary


def _guess(_: _Load, known: Mapping[_Load, Any]) -> list[tuple[float, dict[str, Any]]]:
    return [
        (chance, {**summary, "prefix_hit_ratio": hits})
        for hits, (chance, summary) in zip((1.0, 0.0), guesses(0.5, len(known)), strict=True)
    ]


def _summary_or_none(trace: Trace, task: _Task) -> dict[str, Any] | None:
    """Return the summary of a replay; None if the configuration turns out to be impossible."""
    try:
        return _summary(trace, task)
    except ConfigError:
        return None
