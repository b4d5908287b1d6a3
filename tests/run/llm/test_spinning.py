"""How long threads that wait keep their CPUs busy: set before PyTorch is loaded, and never against the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from kvarts.run.torch import NUM_SPINS

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
TELL = f"import os; print([os.environ.get(name) for name in {NAMES}])"


def told(script: str, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    ran = subprocess.run(
        [sys.executable, "-c", f"{script}\n{TELL}"],
        env=environment | settings,
        capture_output=True,
        check=True,
        text=True,
    )
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "script",
    ["import kvarts.run.torch", "from kvarts.cli.llm import need_torch; need_torch()", "import kvarts.run.torch.llm"],
)
def test_it_is_set_before_pytorch_is_loaded(script: str) -> None:
    assert told(script) == f"['{NUM_SPINS}', None]"


def test_what_the_environment_says_stays() -> None:
    script = "import kvarts.run.torch"
    assert told(script, GOMP_SPINCOUNT="77") == "['77', None]"
    assert told(script, OMP_WAIT_POLICY="active") == "[None, 'active']"


def test_it_is_not_set_when_it_would_say_nothing() -> None:
    assert told("import torch, kvarts.run.torch") == "[None, None]"
