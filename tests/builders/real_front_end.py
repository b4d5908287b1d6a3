"""`kvarts mock --front-end vllm` as a process, with a real vLLM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from kvarts.doors.vllm_front.front_end import PROBE

from builders.ports import free_port
from builders.tiny_model import tiny_model
from builders.vllm_python import vllm_environment, vllm_python

START_S = 400.0
ARGUMENTS = ("--max-model-len", "32768", "--enable-prompt-tokens-details", "--enable-auto-tool-choice",
             "--tool-call-parser", "hermes", "--enable-lora")  # fmt: skip
MODEL = "tiny"


class RealFrontEnd:
    """A running front end. `process`: of kvarts; `log`: its printed lines."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, front_log: Path) -> None:
        self.process = process
        self.port = port
        self._log, self._front_log = log, front_log

    @property
    def log(self) -> str:
        """The lines of kvarts, and the last lines of vLLM."""
        front = self._front_log.read_text(errors="replace")[-3000:] if self._front_log.exists() else ""
        return self._log.read_text() + front

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, timeout_s: float = 60.0
    ) -> tuple[int, Any]:
        """Return the status and the body of an answer, decoded if it is JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            verb = method or ("GET" if body is None else "POST")
            connection.request(verb, path, payload, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            with suppress(json.JSONDecodeError):
                return answer.status, json.loads(text)
            return answer.status, text
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric."""
        status, text = self.call("/metrics")
        assert status == 200
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", str(text), re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def front_pid(self) -> int:
        """Return the process of vLLM: the child of kvarts that leads its own group."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        assert len(found) == 1, children
        return found[0]


def members(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(of_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found


def left_of(group: int, timeout_s: float = 10.0) -> list[int]:
    """Return the processes of a process group that was killed and have not ended within `timeout_s`."""
    deadline_s = monotonic() + timeout_s
    while (left := members(group)) and monotonic() < deadline_s:
        sleep(0.02)
    return left


@contextmanager
def real_front_end(
    version: str,
    directory: Path,
    options: Sequence[str] = (),
    arguments: Sequence[str] = ARGUMENTS,
    *,
    waits: bool = True,
) -> Iterator[RealFrontEnd]:
    """Yield a front end of `version`, or skip the test; SIGTERM ends it, and leaves no process."""
    script, environment = vllm_script(version)
    model = tiny_model(directory / "model")
    port, log, front_log = free_port(), directory / "kvarts.log", directory / "vllm.log"
    words = [
        sys.executable, "-m", "kvarts", "mock", "--front-end", "vllm", "--model", str(model), "--port", str(port),
        "--served-model-name", MODEL, "--set", f"vllm={script}", "--set", f"front_end_log={front_log}",
        *options, "--", *arguments,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
    front = RealFrontEnd(process, port, log, front_log)
    group = 0
    try:
        deadline_s = monotonic() + START_S
        while waits and f":{port}/v1" not in log.read_text():
            assert process.poll() is None, front.log
            assert monotonic() < deadline_s, front.log
            sleep(0.2)
        group = front.front_pid() if waits else 0
        yield front
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60.0)
        left = left_of(group) if group else []
    assert not left, front.log


def vllm_script(version: str) -> tuple[Path, dict[str, str]]:
    """Return the script of vLLM, and the variables with which it is of `version`; or skip the test."""
    environment = vllm_environment(
        version, HF_HUB_OFFLINE="1", VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1"
    )
    script = Path(vllm_python()).with_name("vllm")
    told = subprocess.run(
        [str(script.with_name("python")), "-c", PROBE], env=environment, capture_output=True, check=True
    )
    found = str(json.loads(told.stdout.splitlines()[-1])["version"])
    if not found.startswith(f"{version}."):
        pytest.skip(f"needs vLLM {version}, found {found}")
    return script, environment
