"""Pages of questions whose example is a test file: its tests pass unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builders.plugin import PLUGIN

DOCS = Path(__file__).parents[2] / "docs"
pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("page", "needs", "num_tests"),
    [("how-mock-in-ci.md", "openai", 1), ("how-router-test.md", "zmq", 4), ("how-own-order.md", "msgspec", 16)],
)
def test_the_tests_of_a_page_pass(page: str, needs: str, num_tests: int, pytester: pytest.Pytester) -> None:
    pytest.importorskip(needs)
    examples = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    pytester.makepyfile("".join(examples[:1] + examples[1:][-1:]))  # its definitions, and its tests
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0", "-W", "error")
    result.assert_outcomes(passed=num_tests)
