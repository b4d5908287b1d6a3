"""What the guide and the README show of serving works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builders.http_client import call
from builders.plugin import PLUGIN

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_the_fixture_pass(pytester: pytest.Pytester, number: int) -> None:
    pytest.importorskip("openai")
    page = (ROOT / "docs" / "guide-serving.md").read_text()
    examples = re.findall(r"^```python\n(import pytest\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    example = examples[number]
    assert len([line for line in example.splitlines() if line]) <= 15
    pytester.makepyfile(example)
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0")
    result.assert_outcomes(passed=1)


def test_the_lines_of_the_readme_say_hello() -> None:
    pytest.importorskip("openai")
    page = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"^```bash\n(pip install .*?)^```$", page, re.MULTILINE | re.DOTALL)
    _, serve, ask, *code = lines.strip().splitlines()
    assert (ask, code.pop()) == ("python - <<'END'", "END")
    port = str(20_000 + os.getpid() % 20_000)
    words = serve.removesuffix(" &").replace("8000", port).split()
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    server = subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if call(f"http://127.0.0.1:{port}", "/health").status == 200:
                    break
            except OSError:
                time.sleep(0.02)
        text = "\n".join(code).replace("8000", port)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=True)
    finally:
        server.terminate()
        server.wait(20)
    assert len(done.stdout.split()) == 8
