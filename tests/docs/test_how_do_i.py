"""Pages of questions: the test on `how-mock-in-ci.md` passes as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builders.plugin import PLUGIN
from builders.rooms import missing_room

PAGE = Path(__file__).parents[2] / "docs" / "how-mock-in-ci.md"
pytest_plugins = ["pytester"]


@pytest.mark.skipif(missing_room("kvarts_server") is not None, reason="needs kvarts.openai_api")
def test_the_test_of_a_client_passes(pytester: pytest.Pytester) -> None:
    pytest.importorskip("openai")
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    pytester.makepyfile(example)
    result = pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "-n", "0")
    result.assert_outcomes(passed=1)
