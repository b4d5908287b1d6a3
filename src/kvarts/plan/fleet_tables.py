"""The search for fleets as text."""

from __future__ import annotations

from typing import Any

from kvarts.report.words import number, opening, wrapped
from kvarts.units import as_duration, as_percent

__all__ = ["heading_of", "render_fleets"]

WAYS = ("tensor_parallel", "pipeline_parallel")


def render_fleets(plan: dict[str, Any]) -> str:
    """Return the front, the answer and the options, with a line end."""
    fleets = plan["fleets"]
    share = fleets["slo_share"]
    lines = [plan["trace"], *heading_of(plan["config"]), "", *wrapped(f"{fleets['answer']}.")]
    if fleets["links_are_free"]:
        lines += wrapped("Transfers of KV take no time here: give the rate of the links, --transfer-rate 50GB/s.")
    of_all = f"{fleets['num_replayed']:,} of {fleets['num_fleets']:,} fleets were replayed"
    lines += ["", f"fleets of at most {fleets['gpus']:,} devices that no other beats; {of_all}", ""]
    lines.append(
        f"{'devices':>7}{'hours':>8}{'goodput/s':>10}{'a device':>9}{'SLO kept':>9}{'TTFT p99':>10}{'TPOT p99':>9}  fleet"
    )
    lines += [
        f"{point['devices']:>7,}{point['device_hours']:>8.3f}{number(point['goodput_per_s']):>10}"
        f"{number(point['goodput_per_s_per_device']):>9}{as_percent(point['slo_ratio'], bound=share):>9}"
        f"{as_duration(point['ttft_ms']['p99']):>10}{as_duration(point['tpot_ms']['p99']):>9}  {point['name']}"
        for point in fleets["front"]
    ]
    for option in fleets["options"]:
        lines += ["", *wrapped(f"{option['name']}: {option['what']}")]
        for note in [*option["notes"], *option["would_change"]]:
            lines += wrapped(note, first="  ", rest="  ")
        lines.append(f"  {option['command']}")
    if fleets["left_out"]:
        lines.append("")
        for left in fleets["left_out"]:
            lines += wrapped(f"not possible: {left['kind']}: {left['why']}")
    return "\n".join(lines) + "\n"


def heading_of(config: dict[str, Any]) -> list[str]:
    """Return the setup without what differs among fleets: pages, and the devices of a worker."""
    of_all = {key: value for key, value in config.items() if key != "pages"}
    if isinstance(cost := of_all.get("cost"), dict):
        of_all["cost"] = {key: value for key, value in cost.items() if key not in WAYS}
    return opening(of_all)
