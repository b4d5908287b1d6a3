"""The opening sentence of a plan: the answer, printed before the tables it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarts.report.advice import as_size
from kvarts.report.words import in_memory
from kvarts.units import as_percent

__all__ = ["lead"]


def lead(plan: Mapping[str, Any]) -> str:
    """Return the result of a plan in one or two sentences. Its sizes were replayed if the plan replayed anything."""
    latency = plan.get("latency")
    if latency is None:
        return _of_curve(plan)
    sentences = [_of_slo(plan, latency) if latency["slo_share"] is not None else _of_curve(plan)]
    least = (plan.get("tiers") or {}).get("least_host")
    if least is not None:
        found = f"a replay finds {as_percent(least['hit_ratio'])} of prompt tokens"
        instead = (
            f"instead of {as_percent(_without_host(plan))}, and at most {as_percent(least['most_hit_ratio'])} with more"
        )
        sentences.append(f"With --host-memory {as_size(least['num_bytes'])} {found} {instead}")
    return ". ".join(sentences)


def _of_slo(plan: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    share = latency["slo_share"]
    for option in latency["options"]:
        if option["name"] == "cheapest":
            size = in_memory(option["pages"], plan["config"])
            devices = f", {option['devices']:,} devices in all," if option["devices"] > option["replicas"] else ""
            return (
                f"{option['replicas']} x {option['pages']:,} pages{size}{devices} is the least that keeps the SLO for "
                f"{as_percent(share)} of requests"
            )
    return f"Nothing that was tried keeps the SLO for {as_percent(share)} of requests"


def _of_curve(plan: Mapping[str, Any]) -> str:
    most, pages = plan["most_hit_ratio"], plan["most_pages"]
    config = plan.get("config") or {}
    if not most:
        return "No prompt repeats the beginning of another: no memory gives hits"
    knees = [point for point in plan["knees"] if point["pages"] < pages]
    knee = ""
    if knees:
        point = knees[len(knees) // 2]
        knee = f"{point['pages']:,} pages{in_memory(point['pages'], config)}, the knee, find "
        knee += f"{as_percent(point['hit_ratio'])} of prompt tokens; "
    return f"{knee}{pages:,} pages{in_memory(pages, config)} find all that can be found, {as_percent(most)}"


def _without_host(plan: Mapping[str, Any]) -> float | None:
    first = plan["tiers"]["curve"][0]["replayed"]
    ratio: float | None = None if first is None else first["hit_ratio"]
    return ratio
