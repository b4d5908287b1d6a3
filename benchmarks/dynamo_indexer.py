"""Requests to `python -m dynamo.indexer`, which binds all interfaces, and a network of its own to run it in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

__all__ = ["call", "enter_own_network"]


def call(port: int, path: str, body: Any = None) -> str:
    """Return the answer of a server on loopback."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def enter_own_network() -> None:
    """Run this script again in a network namespace, and exit with it; return if this is that run."""
    if "KVARTS_IN_NAMESPACE" not in os.environ:
        command = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, "KVARTS_IN_NAMESPACE": "1"}, check=False).returncode)
