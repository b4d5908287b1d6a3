"""The search for fleets as text."""

from __future__ import annotations

from typing import Any

from kvarts.report.words import number, opening, wrapped
from kvarts.units import as_duration, as_percent

__all__ = ["heading_of", "render_fleets"]

HEADS = "devices   hours goodput/s per device SLO kept   TTFT p99 TPOT p99  fleet"
WAYS = ("tensor_parallel", "pipeline_parallel")


def render_fleets(plan: dict[str, Any]) -> str:
    """Return the front, the answer and the options, with a line end."""
    fleets = plan["fleets"]
    share = fleets["slo_share"]
    lines = [plan["trace"], *heading_of(plan["config"]), "", *wrapped(f"{plan['advice']}.")]
    if fleets["links_are_free"]:
        lines += wrapped("Transfers of KV take no time here: give the rate of the links, --transfer-rate 50GB/s.")
    of_all = f"{fleets['num_replayed']:,} of {fleets['num_fleets']:,} fleets were replayed"
    lines += ["", f"fleets of at most {fleets['gpus']:,} devices that no other beats; {of_all}", ""]
    heads = (
        f"{'devices':>7}{'hours':>8}{'goodput/s':>10}{'per device':>11}{'SLO kept':>9}{'TTFT p99':>10}{'TPOT p99':>9}"
    )
    lines.append(f"{heads}  fleet")
    lines += [
        f"{point['devices']:>7,}{point['device_hours']:>8.3f}{number(point['goodput_per_s']):>10}"
        f"{number(point['goodput_per_s_per_device']):>11}{as_percent(point['slo_ratio'], bound=share):>9}"
        f"{as_duration(point['ttft_ms']['p99']):>11}{as_duration(point['tpot_ms']['p99']):>9}  {point['name']}"
        for point in fleets["front"]
    ]
    for option in fleets["options"]:
        lines += ["", *wrapped(f"{option['name']}: {option['what']}")]
        for note in [*option["notes"], *option["would_change"]]:
            lines += wrapped(note, first="  ", rest="  ")
        lines.append(f"  {option['command']}")
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
    return "\n".join(lines) + "\n"


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
