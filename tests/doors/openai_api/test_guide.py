"""What the guide and the README show of serving works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from builders.plugin import PLUGIN
from builders.server_process import python_process

ROOT = Path(__file__).parents[3]
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


@pytest.mark.slow
def test_the_lines_of_the_readme_say_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    page = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"^```bash\n(\.venv/bin/pip install .*?)^```$", page, re.MULTILINE | re.DOTALL)
    _, serve, ask, *code = lines.strip().splitlines()
    assert (ask, code.pop()) == (".venv/bin/python - <<'END'", "END")
    command = serve.removesuffix(" &").removeprefix(".venv/bin/").replace("8000", "0").split()
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with python_process(*command) as server:
        port = server.wait_for(r"http://127\.0\.0\.1:(\d+)")[1]
        text = "\n".join(code).replace("8000", port)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr + "".join(server.lines)
        assert server.stop() == 0
    assert len(done.stdout.split()) == 8
