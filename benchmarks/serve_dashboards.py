"""Scrapes a mock with Prometheus, unchanged, and runs every query of vLLM's dashboards.

    python benchmarks/serve_dashboards.py --prometheus /usr/bin/prometheus vllm/examples/observability

    python benchmarks/serve_dashboards.py --prometheus /usr/bin/prometheus vllm/examples/observability \
        --vllm /venvs/vllm/bin/vllm --model DIR

The argument is the folder with vLLM's dashboards for Grafana (.json) and Perses (.yaml). A mock answers chats for
`--seconds`, of which some wait and some are preempted; with `--vllm`, behind vLLM's own front end. Prometheus scrapes
it once a second. Variables of the dashboards are replaced by the values that a person would choose. Prints one JSON
object: the queries of each file, how many of them answer with a number, and those that do not; and what `promtool check
metrics` says, if it is next to Prometheus.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from front_end import Started
from serve_router import free_port, is_up, stop

MODEL = "mock"
VARIABLES = {
    "__rate_interval": "15s",
    "__interval": "15s",
    "__range": "60s",
    "__range_s": "60",
    "model_name": MODEL,
    "Deployment_id": MODEL,
    "Deployment_ID": MODEL,
    "agg_method": "0.90",
}


def main() -> None:
    """Run the mock, Prometheus, the load and the queries."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dashboards", type=Path)
    parser.add_argument("--prometheus", type=Path, required=True)
    parser.add_argument("--vllm", help="a script of vLLM, whose front end is put before the mock")
    parser.add_argument("--model", help="with --vllm: a directory with config.json and tokenizer.json")
    parser.add_argument("--seconds", type=float, default=45.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = ["--served-model-name", MODEL, "--pages", "120", "--max-seqs", "8", "--cost", "linear:step_ms=10"]
        if options.vllm is None:
            words = [sys.executable, "-m", "kvarts", "mock", "--port", "0", *settings]
            mock = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
            stack.callback(stop, mock)
            assert mock.stderr is not None
            url = next(found[0] for line in mock.stderr if (found := re.search(r"http://[\d.:]+", line)))
        else:
            arguments = ["--max-model-len", "1920"]
            front = stack.enter_context(Started(options.vllm, options.model, folder, settings, arguments))
            front.wait_until_up()
            url = front.url
        (folder / "prometheus.yml").write_text(
            f"""global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ["{url.removeprefix("http://")}"]}}]}}]
"""
        )
        door = f"127.0.0.1:{free_port()}"
        arguments = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        command = [options.prometheus, *arguments, f"--web.listen-address={door}"]
        prometheus = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(stop, prometheus)
        if not is_up(f"http://{door}/-/ready", prometheus):
            log.seek(0)
            sys.exit(log.read()[-2000:])
        until = time.monotonic() + options.seconds
        users = [threading.Thread(target=chat, args=(url, user, until)) for user in range(16)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read()
        version = subprocess.run([options.prometheus, "--version"], capture_output=True, text=True, check=True)
        result: dict[str, Any] = {"prometheus": (version.stdout or version.stderr).splitlines()[0], "dashboards": {}}
        for path in sorted((*options.dashboards.rglob("*.json"), *options.dashboards.rglob("*.yaml"))):
            queries = list(queries_of(yaml.safe_load(path.read_text())))
            silent = [query for query in queries if not answers(door, query)]
            if queries:
                name = str(path.relative_to(options.dashboards))
                result["dashboards"][name] = {"queries": len(queries), "without an answer": silent}
        promtool = options.prometheus.with_name("promtool")
        if promtool.exists():
            checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
            said = (checked.stdout + checked.stderr).decode().splitlines()
            others = [line for line in said if not line.endswith("should not contain ':'")]  # as vLLM's names do
            result["promtool"] = {"exit code": checked.returncode, "colons": len(said) - len(others), "others": others}
    print(json.dumps(result, indent=1))


def queries_of(node: Any) -> Iterator[str]:
    """Return the queries of panels and of variables in a dashboard."""
    if isinstance(node, dict):
        for name, value in node.items():
            is_query = name == "expr" or (name == "query" and isinstance(value, str) and "vllm:" in value)
            if is_query and isinstance(value, str) and value.strip():
                yield value.strip()
            else:
                yield from queries_of(value)
    elif isinstance(node, list):
        for value in node:
            yield from queries_of(value)


def answers(door: str, query: str) -> bool:
    """Return whether a query answers with a number at any time of the last minute."""
    labels = re.fullmatch(r"label_values\((?:(?P<series>.+),\s*)?(?P<label>\w+)\)", query)
    if labels is not None:
        match = {"match[]": labels["series"]} if labels["series"] else {}
        found = ask(door, f"label/{labels['label']}/values", match)
        return MODEL in found or bool(found and labels["label"] != "model_name")
    for name, value in VARIABLES.items():
        query = re.sub(rf"\$(?:{name}\b|\{{{name}(?::\w+)?\}})", value, query)
    now = time.time()
    found = ask(door, "query_range", {"query": query, "start": str(now - 60), "end": str(now), "step": "5"})["result"]
    return any(math.isfinite(float(value)) for series in found for _, value in series["values"])


def ask(door: str, path: str, parameters: dict[str, str]) -> Any:
    """Ask Prometheus."""
    query = urllib.parse.urlencode(parameters)
    return json.load(urllib.request.urlopen(f"http://{door}/api/v1/{path}?{query}", timeout=30))["data"]


def chat(url: str, user: int, until: float) -> None:
    """Ask one question after another."""
    number = 0
    while time.monotonic() < until:
        number += 1
        messages = [{"role": "user", "content": f"user {user} asks " + "this and that " * 20 + str(number)}]
        body = {"messages": messages, "max_tokens": 40 + 40 * (number % 3), "ignore_eos": number % 4 > 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()


if __name__ == "__main__":
    main()
