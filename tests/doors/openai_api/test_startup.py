"""A mock is ready soon: what it imports is counted, since time says little on a machine that does other things."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "jinja2",
    "grpc",
    "google.protobuf",
    "zmq",
    "prometheus_client",
    "http.server",
    "scipy",
    "pandas",
    "pyarrow",
    "numba",
    "starlette",
    "kvarts.plan",
    "kvarts.plan.calibrate",
    "kvarts.proof.verify",
    "kvarts.proof.audit",
    "kvarts.proof.explain",
    "kvarts.doors.watch",
    "kvarts.doors.kv_events.publisher",
    "kvarts.run.torch",
    "kvarts.run.torch.llm",
)
MOST_MODULES = 521
"""There are 521: those of kvarts, 86 of numpy, and the rest of the standard library and click."""

CODE = """
import sys
import kvarts.cli.http_options as options
def serve(opened, *_, **__):
    import kvarts.doors.openai.server
    print(opened.served.names[0], file=sys.stderr)
options.serve_http = serve
from kvarts.cli.main import main
sys.argv = ["kvarts", "mock", "--port", "0"]
assert main() == 0
print(*sys.modules)
"""


def test_a_mock_imports_nothing_that_it_does_not_need_to_be_ready() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["llama-3.1-8b"]
    modules = done.stdout.split()
    heavy = [name for name in modules if any(name == other or name.startswith(f"{other}.") for other in HEAVY)]
    light = {"kvarts.plan", "kvarts.plan.policy", "kvarts.proof.audit", "kvarts.proof.audit.opening"}
    assert set(heavy) <= light, "eviction orders by name, and whether there is an audit, are known without the rest"
    assert len(modules) <= MOST_MODULES
