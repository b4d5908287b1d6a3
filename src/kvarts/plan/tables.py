"""A plan as text tables, at most 80 columns wide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarts.base.documents import Column, Document, Table
from kvarts.base.units import as_duration, as_hits, as_memory, as_percent
from kvarts.plan.confidence import would_change
from kvarts.plan.series import usual_points
from kvarts.sim.report.advice import as_size
from kvarts.sim.report.words import NAME_ONE, in_memory, number, opening, page_bytes_of, wrapped

__all__ = [
    "answer_for_users",
    "answer_of_routers",
    "heading_of",
    "lead",
    "money_of",
    "render",
    "render_fleets",
    "render_plan",
    "render_routers",
    "render_users",
]

GIB = 1 << 30
OVERPROVISIONED = 2.0
"""An answer that lasts to this multiple of the rate, and needs the inverse share of its memory, is too large."""
ORIGINS = {
    "own_history": "own session",
    "shared_prefix": "own session and others",
    "other_requests": "other requests",
}
OF_GROUPS = (
    "groups: hits with KV groups, of which more memory can find less, so each size was simulated; optimum: a bound of "
    "these, by the layers that keep every token; hits and evicted: with whole pages"
)
WAYS = ("tensor_parallel", "pipeline_parallel")


def render(plan: dict[str, Any]) -> Document:
    """Return the tables, with a line end."""
    width = 12 if "groups" in plan else 15
    latency = plan.get("latency")
    has_slo = latency is not None and latency["slo_share"] is not None
    lines: list[str | Table] = [*_heading(plan), "", *_paragraph(plan["advice"])]
    lines += _interrupted(plan)
    if "unknown_hits" in plan:
        lines += [] if plan["advice"] == lead({**plan, "latency": None}) else ["", *_paragraph(_of_curve(plan))]
        return Document.of([*lines, *_options(plan), *_latencies(plan)])
    if has_slo:
        lines += [*_options(plan), *_latencies(plan), *_league(plan)]
    knees = {point["pages"] for point in _counted(plan)["knees"]}
    num_tokens = plan["num_prompt_tokens"]
    has_groups = bool(plan["at"]) and "group_hit_ratio" in plan["at"][0]
    columns = [
        Column("pages", 14), Column(_gib_heading(plan), 10), Column("tokens", width), Column("hits", 9),
        Column("optimum", 9), Column("evicted", 9), *[Column("groups", 10)] * has_groups, Column("", 0, is_text=True),
    ]  # fmt: skip
    rows = [
        [
            f"{point['pages']:,}",
            _gib(plan, point["pages"]),
            f"{point['tokens']:,}",
            as_hits(point["hit_ratio"]),
            as_percent(_optimum(point)),
            as_percent(point["computed_tokens"]["evicted"] / num_tokens),
            *[as_hits(point[name]) for name in ("group_hit_ratio",) if has_groups],
            "   knee" if point["pages"] in knees else "",
        ]
        for point in plan["at"]
    ]
    lines += ["", "hits by memory: prefix LRU, one request at a time", "", Table(columns, rows)]
    if "groups" in plan:
        lines += ["", *wrapped(OF_GROUPS)]
    if not has_slo:
        lines += _details(plan, _looked_at(plan)) if plan["at"] else []
        lines += [*_league(plan), *_tiers(plan), *_latencies(plan), *_options(plan), *_in_vllm(plan)]
    return Document.of(lines)


def _interrupted(found: Mapping[str, Any]) -> list[str]:
    """Return what the answer of an interrupted search lacks; empty for a complete one."""
    return [] if found["is_complete"] else ["", *wrapped("Interrupted: this is what was known by then.")]


def _counted(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of interest: those with KV groups where they are counted."""
    counted: Mapping[str, Any] = plan.get("groups") or plan
    return counted


def _optimum(point: Mapping[str, Any]) -> float:
    ratio: float = point.get("group_optimum_hit_ratio", point["optimum_hit_ratio"])
    return ratio


def _paragraph(text: str) -> list[str]:
    return wrapped(f"{text}.")


def _gib_heading(plan: dict[str, Any]) -> str:
    return "GiB" if page_bytes_of(plan.get("config") or {}) else ""


def _gib(plan: dict[str, Any], pages: int) -> str:
    """Return the size of `pages` in GiB; empty without a model."""
    page_bytes = page_bytes_of(plan.get("config") or {})
    return "" if page_bytes is None else f"{pages * page_bytes / GIB:,.1f}"


def render_plan(plan: dict[str, Any]) -> Document:
    """Return the tables of a plan of any kind, with a line end."""
    for kind, rendered in (("fleets", render_fleets), ("users", render_users), ("routers", render_routers)):
        if kind in plan:
            return rendered(plan)
    return render(plan)


def render_routers(plan: dict[str, Any]) -> Document:
    """Return the best router and the table of all, with a line end."""
    routers = plan["routers"]
    has_slo = any(bound is not None for bound in routers["slo"].values())
    columns = [
        Column("router", 0, is_text=True), Column("age", 8), Column("hits", 8), Column("TTFT", 11), Column("p99", 11),
        Column("TPOT p99", 11), Column("most/mean", 10), *[Column("SLO kept", 10)] * has_slo,
    ]  # fmt: skip
    rows = [
        [
            point["router"],
            str(point["age"] or "-"),
            as_hits(point["hit_ratio"]),
            as_duration(point["ttft_ms"]["mean"]),
            as_duration(point["ttft_ms"]["p99"]),
            as_duration(point["tpot_ms"]["p99"]),
            number(point["most_to_mean_tokens"]),
            *[as_percent(point[name]) for name in ("slo_ratio",) if has_slo],
        ]
        for point in routers["points"]
    ]
    best = routers["best"]
    lines: list[str | Table] = [
        f"{plan['trace']} on {routers['replicas']} replicas; {plan['setting']}",
        *opening(plan["config"]),
        "",
        *_paragraph(plan["advice"]),
        *_interrupted(routers),
        "",
        Table(columns, rows),
        "",
        f"best: {_of_router(best)}",
    ]
    for text in best["would_change"]:
        lines += wrapped(text, "  ", "    ")
    lines += [f"  {line}" for line in (best["command"], *best["serve"].values())]
    return Document.of([*lines, "", *_paragraph(routers["prices"]["text"])])


def answer_of_routers(routers: dict[str, Any]) -> str:
    """Return which router is the best, by how much, in how many worlds it stays ahead, and what its GPUs cost."""
    best, second = routers["best"], routers["second"]
    has_slo = best["slo_ratio"] is not None
    servers = _servers(routers["num_devices"], routers)
    if second is None:
        answer = f"{_of_router(best)} is the only router that was replayed"
    elif has_slo and best["slo_ratio"] > second["slo_ratio"]:
        kept, of_second = as_percent(best["slo_ratio"]), as_percent(second["slo_ratio"])
        answer = f"{_of_router(best)} keeps the SLO for {kept} of requests on {servers}, {_of_router(second)} for "
        answer += of_second
    else:
        mean, of_second = (as_duration(each["ttft_ms"]["mean"]) for each in (best, second))
        answer = f"{_of_router(best)} has a mean TTFT of {mean} on {servers}, {_of_router(second)} of {of_second}"
        answer += f"; both keep the SLO for {as_percent(best['slo_ratio'])} of requests" if has_slo else ""
    sentences = [answer]
    if routers["confidence"] is not None:
        sentences.append(f"It is ahead {routers['confidence']['text']}")
    if routers["prices"]["currency"]:
        sentences.append(money_of(routers, routers["prices"]["currency"]))
    return ". ".join(sentences)


def _of_router(point: Mapping[str, Any]) -> str:
    return f"{point['router']}, {point['age']} behind" if point["age"] not in (None, "0") else str(point["router"])


def _servers(num_devices: int, found: Mapping[str, Any]) -> str:
    """Return a number of GPUs in words; of replicas, if no device was named."""
    return f"{num_devices:,} {'GPU' if found['is_on_device'] else 'replica'}{'s' * (num_devices != 1)}"


def render_users(plan: dict[str, Any]) -> Document:
    """Return the table of a search for users, with a line end."""
    users = plan["users"]
    columns = [
        Column("users", 8), Column("hits", 9), Column("TTFT p50", 11), Column("p99", 11), Column("TPOT p99", 11),
        Column("requests/s", 12), Column("SLO kept", 10),
    ]  # fmt: skip
    rows = [
        [
            str(point["users"]),
            as_hits(point["hit_ratio"]),
            as_duration(point["ttft_ms"]["p50"]),
            as_duration(point["ttft_ms"]["p99"]),
            as_duration(point["tpot_ms"]["p99"]),
            number(point["request_throughput_per_s"]),
            as_percent(point["slo_ratio"], bound=users["slo_share"]),
        ]
        for point in users["points"]
    ]
    lines: list[str | Table] = [
        f"{plan['trace']}: {users['num_sessions']:,} sessions, a user in one at a time",
        *opening(plan["config"]),
        "",
        *_paragraph(plan["advice"]),
        *_interrupted(users),
        *_recommended(users["answers"]),
    ]
    host = users["host"]
    if host is not None and host["fits"] is None:
        size = as_memory(host["memory_bytes"] * users["num_devices"])
        lines += ["", *wrapped(f"no users fit with {size} of host memory ({host['policy']} stores) either")]
    if users["slo_share"] is not None:
        lines += ["", *_paragraph(users["prices"]["text"])]
    return Document.of([*lines, "", "replayed", "", Table(columns, rows)])


def answer_for_users(users: dict[str, Any]) -> str:
    """Return how many users fit, on what, in how many worlds, at what cost, and what other options buy."""
    answers, fails = users["answers"], users["fails_at"]
    servers = _servers(users["num_devices"], users)
    if users["slo_share"] is None:
        waits = [f"{as_duration(each['ttft_ms']['p99'])} with {each['users']:,}" for each in users["points"]]
        waits[-1] += ". Give an SLO, such as --slo-ttft-ms 1000"
        return f"Without an SLO any number of users fits on {servers}: TTFT p99 is {', '.join(waits)}"
    kept = next((point["slo_ratio"] for point in users["points"] if point["users"] == fails), None)
    if not answers:
        if fails is None:
            return f"How many users fit on {servers} is not known yet"
        few = "No user fits" if fails == 1 else f"Fewer than {fails:,} users fit"
        return f"{few} on {servers}" + _too_many(users, fails, kept)
    fits = [
        f"{each['users']:,} user{'s fit' if each['users'] != 1 else ' fits'} on {each['named']}"
        + (f", {each['confidence']['text']}" if each["confidence"] is not None else "")
        for each in answers
    ]
    sentences = ["; ".join(fits) + (_too_many(users, fails, kept) or "; no limit was found")]
    if currency := users["prices"]["currency"]:
        per_user = f", {currency} {answers[0]['price_per_user_hour']:,.2f} per user"
        sentences.append(money_of(answers[0], currency, per_user))
    return ". ".join(sentences)


def _too_many(users: Mapping[str, Any], fails: int | None, kept: float | None) -> str:
    """Return for how many requests the first number of users that does not fit keeps the SLO, and with which option."""
    if fails is None or kept is None:
        return ""
    noun, keep = ("user", "keeps") if fails == 1 else ("users", "keep")
    alone = "Without host memory, " if any(answer["host_bytes"] for answer in users["answers"]) else ""
    text = f". {alone}{fails:,} {noun} {keep} the SLO for {as_percent(kept)} of the requests"
    better = sorted(
        (point for point in users["options"] if point["slo_ratio"] > kept), key=lambda point: -point["slo_ratio"]
    )
    if better:
        return f"{text}, " + ", ".join(f"{as_percent(each['slo_ratio'])} with {each['option']}" for each in better)
    tried = ", ".join(point["option"] for point in users["options"])
    return f"{text}, and for no more with {tried}" if tried else text


def _heading(plan: dict[str, Any]) -> list[str]:
    """Return the trace, and the configuration if there is one."""
    what = f"{plan['trace']}: {plan['num_requests']:,} requests, {plan['num_prompt_tokens']:,} prompt tokens"
    if plan.get("config"):
        return [what, *opening(plan["config"])]
    return [what, f"pages of {plan['page_size']} tokens; nothing is replayed", f"  for latencies, {NAME_ONE}"]


def _looked_at(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the point shown in detail: the middle knee among the points, or else the middle point."""
    knees = [point["pages"] for point in _counted(plan)["knees"]]
    among = [point for point in plan["at"] if point["pages"] in knees] or plan["at"]
    point: dict[str, Any] = among[len(among) // 2]
    return point


def _details(plan: dict[str, Any], point: dict[str, Any]) -> list[str | Table]:
    computed = point["computed_tokens"]
    tokens = plan["num_prompt_tokens"]
    of_all = {
        "found": point["hit_tokens"],
        "evicted": computed["evicted"],
        "not in full pages": computed["unaligned"],
        "never seen before": computed["never_seen"],
    }
    rows: list[list[str]] = []
    for title, key, names in (
        ("from ", "by_origin", ORIGINS),
        ("after ", "by_age", None),
        ("turn ", "by_turn", None),
        ("tenant ", "by_tenant", None),
    ):
        for name, count in point.get(key, {}).items():
            if count["hit_tokens"] or count["evicted_tokens"]:
                text = f"{title}{name if names is None else names[name]}"
                rows.append([text[:24], f"{count['hit_tokens']:,}", f"{count['evicted_tokens']:,}"])
    return [
        "",
        f"with {point['pages']:,} {'whole ' if 'groups' in plan else ''}pages, of prompt tokens",
        Table(
            [Column("", 24, is_text=True), Column("", 18), Column("", 10)],
            [[name, f"{count:,}", as_percent(count / tokens)] for name, count in of_all.items()],
            indent=2,
        ),
        "",
        Table([Column("", 24, is_text=True), Column("found", 18), Column("evicted", 18)], rows, indent=2),
    ]


def _league(plan: dict[str, Any]) -> list[str | Table]:
    """Return the comparison of policies; empty if none was requested."""
    rows = plan.get("league", [])
    if not rows:
        return []
    found = [
        [f"{row['pages']:,}", f"  {row['policy'][-31:]}", as_hits(row["hit_ratio"]), as_percent(row["gap_closed"])]
        for row in rows
        if "replayed" not in row
    ]
    columns = [Column("pages", 14), Column("  policy", 34, is_text=True), Column("hits", 10), Column("gap", 10)]
    what = "policies, one request at a time; gap: how much of that from LRU to the optimum is closed"
    lines: list[str | Table] = ["", what, "", Table(columns, found)]
    replayed = [row for row in rows if "replayed" in row]
    if replayed:
        columns = [
            Column("pages", 14), Column("  policy", 26, is_text=True), Column("hits", 9), Column("TTFT mean", 11),
            Column("p99", 11), Column("goodput/s", 9),
        ]  # fmt: skip
        found = [
            [
                f"{row['pages']:,}",
                f"  {row['policy'][-23:]}",
                as_hits(row["hit_ratio"]),
                as_duration(row["ttft_ms"]["mean"]),
                as_duration(row["ttft_ms"]["p99"]),
                number(row["goodput_per_s"]),
            ]
            for row in replayed
        ]
        lines += ["", "the same, replayed", "", Table(columns, found)]
    if (lead := plan.get("league_lead")) is not None and lead["is_ahead"]:
        lines += ["", *wrapped(f"{lead['policy']}: {would_change(lead['sensitivity'])[0]}")]
    return lines


def _tiers(plan: dict[str, Any]) -> list[str | Table]:
    """Return the savings by memory below the device; empty without a model."""
    tiers = plan.get("tiers")
    if tiers is None:
        return []
    first = next(iter(tiers["load_us_per_token"]))
    what = (
        f"device and {'host memory' if first == 'host' else first}: hits as replayed, next to a bound: one LRU list, "
    )
    what += "one request at a time"
    if "groups" in plan:
        what += ", of the parts that memory below a device keeps; each size was simulated"
    lines: list[str | Table] = [
        "",
        *wrapped(what),
        *_tier_curve(tiers["curve"], *list(tiers["now"]["pages"])[:2]),
    ]
    first, *others = tiers["load_us_per_token"]
    prefill_us = tiers["prefill_us_per_token"]
    if others and not tiers["now"]["pages"][first]:
        below = "files are" if others[0] == "disk" else f"{others[0]} is"
        size = "host memory: with --host-memory" if first == "host" else f"{first}: with a size of that"
        lines += ["", f"{below} below {size}, they are looked at too"]
    elif others and (load_us := tiers["load_us_per_token"][others[0]]) < prefill_us:
        lines += ["", f"{others[0]} below that", *_tier_curve(tiers["disk_curve"], first, others[0])]
    elif others:
        lines += ["", f"a token takes {load_us:,.1f} us to load from {others[0]} and {prefill_us:,.1f} us to compute"]
    lines += ["", "the next GiB saves, by the bound"]
    for each in tiers["next_gib"]:
        text = f"  {each['tier']:<8}{number(each['saved_s_per_hour']):>10} s/h"
        text += f"{number(each['saved_ms_per_request']):>10} ms a request"
        if each["price"] is not None:
            text += f"{number(each['saved_s_per_price']):>12} s for a unit of price"
        lines.append(text)
    if tiers["best_buy"] is not None:
        lines.append(f"  {tiers['best_buy']} memory saves most for its price")
    return lines


def _in_vllm(plan: dict[str, Any]) -> list[str]:
    """Return the vLLM option for the host memory that the plan found."""
    config = (plan.get("tiers") or {}).get("kv_transfer_config")
    if config is None:
        return []
    size = config["kv_connector_extra_config"]["host_memory"]
    return ["", f"in vLLM, {size} of host memory kept by kvarts", f"  --kv-transfer-config '{json.dumps(config)}'"]


def _tier_curve(points: list[dict[str, Any]], above: str, below: str) -> list[str | Table]:
    columns = [
        Column(f"{above} GiB", 12), Column(f"{below} GiB", 10), Column("replayed", 11), Column(f"from {below}", 11),
        Column("TTFT p99", 12), Column("bound", 9), Column("saved", 13),
    ]  # fmt: skip
    rows = [
        [
            f"{point['gib'][above]:,.1f}",
            f"{point['gib'][below]:,.1f}",
            *_as_replayed(point, below),
            as_percent(sum(point["hit_ratio"].values())),
            f"{number(point['saved_s_per_hour'])} s/h",
        ]
        for point in points
    ]
    return ["", Table(columns, rows)]


def _as_replayed(point: dict[str, Any], tier: str) -> list[str]:
    """Return a replay's total hits, hits in `tier`, and TTFT; dashes without a replay."""
    replayed = point.get("replayed")
    if replayed is None:
        return ["-", "-", "-"]
    of_tier = replayed["hit_ratio_by_tier"].get(tier, 0.0)
    return [as_hits(replayed["hit_ratio"]), as_percent(of_tier), as_duration(replayed["ttft_ms"]["p99"])]


def _latencies(plan: dict[str, Any]) -> list[str | Table]:
    """Return the section on replays; empty if nothing was replayed."""
    latency = plan.get("latency")
    if latency is None:
        return []
    has_host = any(point["host_bytes"] for point in latency["points"])
    columns = [
        Column("replicas", 8), Column("pages", 10), Column(_gib_heading(plan), 7),
        *[Column("host", 7), Column("  policy", 11, is_text=True)] * has_host, Column("rate", 6), Column("hits", 8),
        *[Column("TTFT p50", 11)] * (not has_host), Column("TTFT p99" if has_host else "p99", 11),
        Column("TPOT p99", 10), Column("SLO", 8),
    ]  # fmt: skip
    rows = [
        [
            str(point["replicas"]),
            f"{point['pages']:,}",
            _gib(plan, point["pages"]),
            *([f"{point['host_bytes'] / GIB:,.1f}", f"  {point['policy'] or ''}"] if has_host else []),
            f"{point['rate']:.3g}",
            as_hits(point["hit_ratio"]),
            *[as_duration(point["ttft_ms"]["p50"])] * (not has_host),
            as_duration(point["ttft_ms"]["p99"]),
            as_duration(point["tpot_ms"]["p99"]),
            as_percent(point["slo_ratio"], bound=latency["slo_share"]),
        ]
        for point in usual_points(latency)
    ]
    lines: list[str | Table] = ["", "replayed", "", Table(columns, rows)]
    return lines


def _recommended(options: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for option in options:
        lines += ["", *wrapped(f"{option['name']}: {option['what']}")]
        for text in (*option["notes"], *option["would_change"]):
            lines += wrapped(text, "  ", "    ")
        lines.append(f"  {option['command']}")
        lines += [f"  {line}" for line in option["serve"].values()]
    return lines


def _options(plan: dict[str, Any]) -> list[str | Table]:
    """Return the recommendations, each with what would change it and its command lines; empty without replays."""
    latency = plan.get("latency") or {"options": [], "slo_share": None}
    lines: list[str | Table] = [*_recommended(latency["options"])]
    if latency["options"] and latency["slo_share"] is not None:
        lines += ["", *wrapped(f"{latency['prices']['text']}.")]
    return lines


def lead(plan: Mapping[str, Any]) -> str:
    """Return the result of a plan in one or two sentences. Its sizes were replayed if the plan replayed anything."""
    latency = plan.get("latency")
    if latency is None:
        of_league = _of_league(plan)
        return ". ".join([*of_league, _of_curve(plan), *([] if of_league else _of_half(plan))])
    has_answer = latency["slo_share"] is not None and latency["points"]
    sentences = [*_of_league(plan), _of_slo(plan, latency) if has_answer else _of_curve(plan)]
    least = (plan.get("tiers") or {}).get("least_host")
    if least is not None:
        found = f"a replay finds {as_hits(least['hit_ratio'])} of prompt tokens"
        alone, before = "", _without_host(plan)
        if "hit_ratio_without" in least:
            alone, before = " alone", least["hit_ratio_without"]
        instead = f"instead of {as_percent(before)}, and at most {as_hits(least['most_hit_ratio'])} with more"
        listed = ((plan.get("config") or {}).get("offload") or {}).get("tiers")
        option = f"--tier {listed[0]['name']}:size=" if listed else "--host-memory "
        sentences.append(f"With {option}{as_size(least['num_bytes'])}{alone} {found} {instead}")
    return ". ".join(sentences)


def _of_slo(plan: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    share = as_percent(latency["slo_share"])
    options = latency["options"]
    if not options or not options[0]["keeps_slo"]:
        most = max((point["devices"] for point in latency["points"]), default=1)
        noun = "replicas" if plan["config"].get("device") is None else "GPUs"
        tried = f", up to {most:,} {noun}," if most > 1 else ""
        nothing = f"Nothing that was tried{tried} keeps the SLO for {share} of requests"
        closest = "".join(f": {each['named']} for {as_percent(each['slo_ratio'])}" for each in options[:1])
        return f"{nothing}{closest}"
    best = options[0]
    instead = next((f", or {each['named']}," for each in options[1:] if each["name"] == "devices"), "")
    is_one = best["devices"] == 1 and " and " not in best["named"] and not instead
    verb = "keeps" if is_one else "keep"
    text = f"{best['named']}{instead} {verb} the SLO for {share} of requests"
    if latency["confidence"] is not None:
        text += f", {latency['confidence']['text']}"
    sentences = [*_spare(latency["sensitivity"]), text]
    if latency["prices"]["currency"]:
        sentences.append(money_of(best, latency["prices"]["currency"]))
    return ". ".join(sentences)


def _spare(sensitivity: Mapping[str, Any]) -> list[str]:
    """Return a sentence on memory and rate that the answer does not need; empty if it needs most of both."""
    rate = (sensitivity.get("rate") or {}).get("up_to")
    share = (sensitivity.get("memory") or {}).get("share", 1.0)
    if rate is None or rate < OVERPROVISIONED or share > 1 / OVERPROVISIONED:
        return []
    return [f"{as_percent(share)} of the KV memory would be enough, and all of it lasts to {rate:.3g} times the rate"]


def money_of(option: Mapping[str, Any], currency: str, per_user: str = "") -> str:
    """Return what an option costs an hour and per million tokens, as a sentence."""
    per_hour, per_million = option["price_per_hour"], option["price_per_million_tokens"]
    text = f"It costs {currency} {per_hour:,.2f} an hour{per_user}"
    return text if per_million is None else f"{text}, {currency} {per_million:,.4f} per million tokens"


def _of_curve(plan: Mapping[str, Any]) -> str:
    if "unknown_hits" in plan:
        return f"H{plan['unknown_hits'][1:]}"
    counted = _counted(plan)
    most, pages = counted["most_hit_ratio"], counted["most_pages"]
    if not most:
        return "No prompt repeats the beginning of another: no memory gives hits"
    knee = ""
    if (point := _knee(counted)) is not None:
        knee = f"{point['pages']:,} pages{_memory(point['pages'], plan)}, the knee, find "
        knee += f"{as_hits(point['hit_ratio'])} of prompt tokens; "
    return f"{knee}{pages:,} pages{_memory(pages, plan)}, the working set, find all that there is, {as_percent(most)}"


def _of_half(plan: Mapping[str, Any]) -> list[str]:
    """Return the hits of half of the knee's memory and of twice as much; empty where nothing is found."""
    counted = _counted(plan)
    if plan.get("config") or not counted["most_hit_ratio"] or not (knee := _knee(counted)):
        return []
    half, twice = (as_percent(_hits_at(counted["curve"], knee["pages"] * factor)) for factor in (0.5, 2))
    return [f"Half of the knee's memory finds {half}, and twice as much {twice}"]


def _knee(counted: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the middle knee below the working set; None without one."""
    knees = [point for point in counted["knees"] if point["pages"] < counted["most_pages"]]
    return knees[len(knees) // 2] if knees else None


def _hits_at(curve: Mapping[str, Sequence[float]], pages: float) -> float:
    """Return the hit ratio of a curve at a size, between its points on a line."""
    from numpy import interp

    return float(interp(pages, curve["pages"], curve["hit_ratio"], left=0.0))


def _of_league(plan: Mapping[str, Any]) -> list[str]:
    """Return a sentence on the policy that finds most more than LRU; empty if none were compared."""
    rows = [row for row in plan.get("league") or () if "replayed" not in row]
    if not rows:
        return []
    best = max(rows, key=lambda row: row["hit_ratio"] - row["lru_hit_ratio"])
    config = plan.get("config") or {}
    size = f"{best['pages']:,} pages{_memory(best['pages'], plan)}"
    gained = 100 * (best["hit_ratio"] - best["lru_hit_ratio"])
    lead = plan.get("league_lead")
    of_replays = [] if lead is None else [_of_lead(lead, plan)]
    if gained <= 0:
        none = f"No policy finds more than LRU, {as_hits(best['lru_hit_ratio'])} of prompt tokens with {size}"
        return [none, *of_replays]
    found, points = as_hits(best["hit_ratio"]), f"{gained:.1f} point{'s' * (f'{gained:.1f}' != '1.0')}"
    text = f"{best['policy']} finds {found} of prompt tokens with {size}, {points} more than LRU"
    curve = _counted(plan)["curve"]
    enough = next((each for each, hits in zip(*curve.values(), strict=True) if hits >= best["hit_ratio"]), None)
    if enough is not None and enough > best["pages"]:
        text += f", which needs {enough:,.0f} pages{in_memory(int(enough), config)} for as many"
    sizes = {row["pages"] for row in rows}
    ahead = {row["pages"] for row in rows if row["policy"] == best["policy"] and row["gap_closed"]}
    if len(sizes) > 1:
        text += f"; it is ahead of LRU at {len(ahead & sizes)} of {len(sizes)} sizes"
    return [text, *of_replays]


def _of_lead(lead: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Return what the policy that gains most on LRU gains when replayed, and in how many worlds."""
    size = f"Replayed with {lead['pages']:,} pages{_memory(lead['pages'], plan)}"
    if not lead["is_ahead"]:
        return f"{size}, no policy is better than LRU; {lead['policy']} is ahead {lead['confidence']['text']}"
    mean, of_lru = (as_duration(lead["ttft_ms_mean"][name]) for name in ("policy", "lru"))
    kept = lead["slo_ratio"]
    slo = "" if kept["lru"] is None else f", and keeps the SLO for {as_percent(kept['policy'])} of requests instead of "
    slo += "" if kept["lru"] is None else as_percent(kept["lru"])
    return f"{size}, {lead['policy']} has a mean TTFT of {mean} instead of {of_lru}{slo}, {lead['confidence']['text']}"


def _memory(pages: int, plan: Mapping[str, Any]) -> str:
    """Return the memory of pages, in parentheses: in GiB with a model, else in tokens."""
    if config := plan.get("config"):
        return in_memory(pages, config)
    return f" ({pages * plan['page_size']:,} tokens)"


def _without_host(plan: Mapping[str, Any]) -> float | None:
    first = plan["tiers"]["curve"][0]["replayed"]
    ratio: float | None = None if first is None else first["hit_ratio"]
    return ratio


def render_fleets(plan: dict[str, Any]) -> Document:
    """Return the front, the answer and the options, with a line end."""
    fleets = plan["fleets"]
    share = fleets["slo_share"]
    lines: list[str | Table] = [plan["trace"], *heading_of(plan["config"]), "", *wrapped(f"{plan['advice']}.")]
    lines += _interrupted(fleets)
    if fleets["links_are_free"]:
        lines += wrapped("Transfers of KV take no time here: give the rate of the links, --transfer rate=50GB/s.")
    of_all = f"{fleets['num_replayed']:,} of {fleets['num_fleets']:,} fleets were replayed"
    lines += ["", f"fleets of at most {fleets['gpus']:,} devices that no other beats; {of_all}", ""]
    columns = [
        Column("devices", 7), Column("hours", 8), Column("goodput/s", 10), Column("per device", 11),
        Column("SLO kept", 9), Column("TTFT p99", 11), Column("TPOT p99", 9), Column("  fleet", 0, is_text=True),
    ]  # fmt: skip
    rows = [
        [
            f"{point['devices']:,}",
            f"{point['device_hours']:.3f}",
            number(point["goodput_per_s"]),
            number(point["goodput_per_s_per_device"]),
            as_percent(point["slo_ratio"], bound=share),
            as_duration(point["ttft_ms"]["p99"]),
            as_duration(point["tpot_ms"]["p99"]),
            f"  {point['name']}",
        ]
        for point in fleets["front"]
    ]
    lines.append(Table(columns, rows))
    lines += [*_recommended(fleets["options"]), "", *_paragraph(fleets["prices"]["text"])]
    if "scaler" in fleets:
        lines += _scaler(fleets["scaler"], share)
    lines += _assumption(fleets)
    reasons: dict[str, list[str]] = {}
    for left in fleets["left_out"]:
        reasons.setdefault(left["why"], []).append(left["kind"])
    if reasons:
        lines.append("")
    for why, kinds in reasons.items():
        more = f" and {len(kinds) - 1:,} more" if len(kinds) > 1 else ""
        lines += wrapped(f"left out: {kinds[0]}{more}: {why}")
    return Document.of(lines)


def _assumption(fleets: dict[str, Any]) -> list[str]:
    """Return a warning if replays contradict the assumption of the search."""
    found = fleets["assumption"]
    if not found["num_broken"]:
        return []
    is_share = fleets["compared_by"] == "slo_ratio"
    drop = as_percent(found["largest_drop"]) if is_share else f"{number(found['largest_drop'])} requests/s"
    pairs = f"{found['num_broken']:,} of {found['num_pairs']:,} pairs of replays"
    text = f"in {pairs}, more workers have less goodput, by at most {drop}: a fleet that was not replayed may be better"
    return ["", *wrapped(text)]


def _scaler(scaler: dict[str, Any], share: float) -> list[str]:
    """Return the cost of a policy of autoscaling, compared with that of the fixed fleet."""
    if scaler["begins_as"] is None:
        return ["", *wrapped(f"scaler: {scaler['policy']} is not replayed: no fleet above has its pools")]
    fixed = scaler["fixed"]
    hours = f"{scaler['device_hours']:.3f} device hours instead of {fixed['device_hours']:.3f}"
    kept, kept_fixed = (as_percent(each["slo_ratio"], bound=share) for each in (scaler, fixed))
    if not scaler["keeps_slo"]:
        verdict = "does not keep the SLO"
    else:
        verdict = "pays" if scaler["device_hours"] < fixed["device_hours"] else "does not pay"
    what = (
        f"{scaler['policy']} {verdict}: beginning as {scaler['begins_as']}, it takes {hours}, and the SLO is kept by "
    )
    return ["", *wrapped(f"scaler: {what}{kept} instead of {kept_fixed}"), f"  {scaler['command']}"]


def heading_of(config: dict[str, Any]) -> list[str]:
    """Return the setup without what differs among fleets: pages, and the devices of a worker."""
    of_all = {key: value for key, value in config.items() if key != "pages"}
    if isinstance(cost := of_all.get("cost"), dict):
        of_all["cost"] = {key: value for key, value in cost.items() if key not in WAYS}
    return opening(of_all)
