"""The dashboard for Grafana: its form, its queries against the metrics of a mock, and against a real Prometheus."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvarts.doors.openai.running import RunningServer

from builders.http_client import call
from builders.ports import free_port

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "kvarts.json").read_text())
PROMETHEUS = os.environ.get("KVARTS_PROMETHEUS") or shutil.which("prometheus")
SELECTOR = re.compile(r"([a-z]+:[a-z0-9_]+)\{([^}]*)\}")


def queries() -> list[tuple[str, str, str]]:
    """Return the title, the legend and the query of each target."""
    return [
        (panel["title"], target["legendFormat"], target["expr"])
        for panel in BOARD["panels"]
        for target in panel["targets"]
    ]


def ask(server: RunningServer, number: int) -> None:
    """Send a prompt that shares pages with earlier ones, in a pool that has to evict and store some."""
    start = 1000 * (number % 7)
    assert (
        call(server.url, "/v1/completions", {"prompt": list(range(start, start + 400)), "max_tokens": 8}).status == 200
    )


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(
        model="llama-3.1-8b", pages=100, host_memory="256MiB", offload="eager", speedup=20, output_tokens=8
    ) as running:
        for number in range(20):
            ask(running, number)
        yield running


@pytest.fixture(scope="module")
def metrics(server: RunningServer) -> tuple[dict[str, list[dict[str, str]]], dict[str, str]]:
    """Return the labels of each series, by name, and the types of metrics."""
    text = call(server.url, "/metrics").payload.decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    series: dict[str, list[dict[str, str]]] = {}
    for name, labels in re.findall(r"^([a-z_:0-9]+)\{(.*)\} \S+$", text, re.MULTILINE):
        series.setdefault(name, []).append(dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    return series, types


def test_it_is_a_dashboard_that_imports() -> None:
    assert BOARD["id"] is None, "an import makes an id"
    assert BOARD["schemaVersion"] >= 36 and BOARD["title"] and BOARD["uid"]
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) == 23, "panels of a row of 24 do not overlap"
    for panel in panels:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"] and panel["datasource"]["uid"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) and all(target["legendFormat"] for target in panel["targets"])
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD))) - {"__rate_interval"}
    assert used <= variables


@pytest.mark.parametrize(("title", "legend", "query"), queries())
def test_a_query_asks_for_metrics_that_are_there(
    title: str, legend: str, query: str, metrics: tuple[dict[str, list[dict[str, str]]], dict[str, str]]
) -> None:
    series, types = metrics
    assert query.count("(") == query.count(")")
    selectors = SELECTOR.findall(query)
    assert selectors and len(selectors) == len(re.findall(r"(?:vllm|kvarts):", query))
    for name, matchers in selectors:
        assert name in series, f"{title}: {name}"
        labels = {*series[name][0]}
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels
        assert {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")} <= labels
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels
        family = re.sub(r"_(total|bucket)$", "", name)
        kind = types.get(name, types.get(family))
        is_rate = f"rate({name}{{" in query
        assert is_rate is (kind in ("counter", "histogram")), f"{title}: {name} is a {kind}"
        assert name.endswith("_bucket") is ("histogram_quantile" in query)


@pytest.mark.long
@pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus, on the path or in KVARTS_PROMETHEUS")
def test_prometheus_answers_every_query(server: RunningServer, tmp_path: Path) -> None:
    target = server.url.removeprefix("http://")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: kvarts, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    door = f"127.0.0.1:{free_port()}"
    command = [
        str(PROMETHEUS),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address={door}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as prometheus:
        try:
            until = time.monotonic() + 12
            number = 0
            while time.monotonic() < until:
                ask(server, number)
                number += 1
                time.sleep(0.2)
            silent = [query for *_, query in queries() if not answers(door, query)]
        finally:
            prometheus.terminate()
    assert not silent


def answers(door: str, query: str) -> bool:
    """Return whether a query answers with a number."""
    query = query.replace("$__rate_interval", "6s").replace("$model_name", ".*")
    now = time.time()
    parameters = urllib.parse.urlencode({"query": query, "start": now - 10, "end": now, "step": 1})
    try:
        with urllib.request.urlopen(f"http://{door}/api/v1/query_range?{parameters}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    return any(math.isfinite(float(value)) for series in found for _, value in series["values"])
