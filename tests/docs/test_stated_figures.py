"""Figures in sentences of the README and the docs, computed again: a sentence that has drifted fails.

Each row of CLAIMS is a page, a pattern that finds the figures in its text, and what computes whether they hold. Figures
of examples are compared by test_docs; those of campaigns stand in docs/performance.md with their commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvarts import load_trace, replay
from kvarts.base.files import SAMPLES
from kvarts.cli.replaying import all_sections
from kvarts.cost.roofline_settings import shipped_constants
from kvarts.plan.calibrate import compare, load_measured
from kvarts.plan.calibrate.comparison import Comparison, replayed_of
from kvarts.sim.config import make_config

ROOT = Path(__file__).parents[2]
MEASURED = {"pages": 2587, "max_batched_tokens": 2048}
ON = {"model": "llama-3.1-8b", "device": "rtx-4090"}


@cache
def compared(calibrated: bool) -> Comparison:
    """The bundled measured run, and its replay: with the bundled calibration, or with none."""
    cost = {"cost": "sample:vllm-rtx4090/cost.toml"} if calibrated else ON
    report = replay(load_trace("sample:vllm-rtx4090"), make_config({**cost, **MEASURED}))
    return compare(load_measured("sample:vllm-rtx4090/requests.jsonl"), replayed_of(report), None)


@cache
def sessions() -> dict[str, Any]:
    """The summary of what `kvarts replay` replays."""
    on = {"model": "llama-3.1-8b", "device": "h100-80gb"}
    return replay(load_trace("sample:agents"), make_config(on, sections=all_sections())).summary


def is_within(bound_pct: str) -> bool:
    """A bound holds, and is not more than a tenth of a point above what it bounds."""
    worst = 100 * compared(calibrated=True).worst
    return worst <= float(bound_pct) <= worst + 0.1


def rounds_to(value: float, text: str) -> bool:
    digits = len(text.partition(".")[2])
    return f"{value:.{digits}f}" == text


def are_held_out(*medians_pct: str) -> bool:
    """The medians of TPOT that ship, for dense models and those with experts, in fp8 in closed loops, are these."""
    constants = shipped_constants()
    found = [constants.held_out_of("NVIDIA", kind, "closed", "fp8")["tpot"].median for kind in ("dense", "experts")]
    return all(map(rounds_to, [100 * median for median in found], medians_pct))


CLAIMS: list[tuple[str, str, Callable[..., bool]]] = [
    ("docs/index.md", r"every mean and percentile of TTFT, TPOT and E2E is within ([\d.]+) % of that run", is_within),
    (
        "docs/index.md",
        r"uncalibrated, they are ([\d.]+) % off on average",
        lambda text: rounds_to(100 * compared(calibrated=False).mean, text),
    ),
    (
        "docs/index.md",
        r"TPOT is (\d+) % off in the median for a dense model, (\d+) % with experts",
        are_held_out,
    ),
    (
        "README.md",
        r"half of all first tokens come within (\d+) ms, and one in ten takes more than 2 seconds",
        lambda text: rounds_to(sessions()["ttft_ms"]["p50"], text) and sessions()["ttft_ms"]["p90"] > 2_000,
    ),
    (
        "README.md",
        r"the maximum of (\d+) s is the burst at the start",
        lambda text: rounds_to(sessions()["ttft_ms"]["max"] / 1e3, text),
    ),
    ("README.md", r"twelve recorded sessions", lambda: len(load_trace("sample:agents").requests or ()) == 406),
]


@pytest.mark.parametrize(("page", "pattern", "holds"), CLAIMS, ids=[f"{page}: {text}" for page, text, _ in CLAIMS])
def test_claims_hold(page: str, pattern: str, holds: Callable[..., bool]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    found = re.search(pattern, text)
    assert found is not None, f"{page} no longer says {pattern}: change the table as well"
    assert holds(*found.groups()), f"{page}: {found[0]}"


def test_equality_with_vllm_is_claimed_as_its_table_has_it() -> None:
    page = (ROOT / "docs" / "equal-to-vllm.md").read_text()
    rows = {cells[1].strip(): cells for line in page.splitlines() if len(cells := line.split("|")) == 7}
    counts = {name: int(cells[3].replace(",", "")) for name, cells in rows.items() if cells[3].strip()[:1].isdigit()}
    claimed = [name for name, count in counts.items() if count >= 10_000 and rows[name][5].strip() == "0"]
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"On ([\d,]+) random workloads, with windows, asynchronous .*, vLLM ([\d.]+)'s own", text)
    assert found is not None and len(claimed) > 10
    assert found[1] == f"{sum(counts[name] for name in claimed):,}"
    assert all(rows[name][4].strip().startswith(f"{found[2]}.") for name in claimed)


def test_no_accuracy_is_claimed_on_the_first_pages_that_is_not_computed() -> None:
    text = " ".join(f"{(ROOT / 'README.md').read_text()} {(ROOT / 'docs' / 'index.md').read_text()}".split())
    claimed = re.findall(r"\b[\d.]+ % (?:of that run|off)", text)
    computed = [found[0] for _, pattern, _ in CLAIMS for found in re.finditer(pattern, text)]
    assert claimed and all(any(claim in whole for whole in computed) for claim in claimed)


def test_samples_are_the_files_that_are_bundled() -> None:
    data = ROOT / "src" / "kvarts" / "data"
    bundled = {path.name for path in data.iterdir() if not path.name.startswith(("LICENSE", "README", "__"))}
    assert bundled == {sample.file.partition("/")[0] for sample in SAMPLES.values()}
