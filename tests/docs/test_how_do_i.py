"""Pages of questions: the test on `how-mock-in-ci.md` passes as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builders.plugin import PLUGIN

PAGE = Path(__file__).parents[2] / "docs" / "how-mock-in-ci.md"
pytest_plugins = ["pytester"]


def test_the_test_of_a_client_passes(pytester: pytest.Pytester) -> None:
    pytest.importorskip("openai")
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    pytester.makepyfile(example)
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0")
    result.assert_outcomes(passed=1)
