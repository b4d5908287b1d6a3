"""What combines: every row of the table is raised somewhere, and docs/limits.md has the table of today."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from combinations import PAGE, page
from kvarts.base.errors import ConfigError
from kvarts.core.parts.combines import FEATURES, PLACES, REFUSED, check_combination, why_not

SOURCE = Path(__file__).parents[2] / "src" / "kvarts"


def test_the_docs_have_the_table() -> None:
    assert page(PAGE.read_text()) == PAGE.read_text(), "run python scripts/combinations.py"


def test_the_table_names_what_there_is() -> None:
    for refusal in REFUSED:
        assert set(refusal.together) <= {*FEATURES, *PLACES}
        assert refusal.why[0].islower() or (refusal.why.startswith("Dynamo") and not refusal.why.endswith("."))
    assert len({frozenset(refusal.together) for refusal in REFUSED}) == len(REFUSED)
    for feature in FEATURES.values():
        assert set(feature.places) <= set(PLACES)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: "-".join(refusal.together))
def test_each_row_refuses_what_it_names_and_nothing_less(refusal: tuple[tuple[str, ...], str, str]) -> None:
    together = refusal[0]
    given = {name: f"--{name}" for name in together}
    with pytest.raises(ConfigError) as caught:
        check_combination(given)
    assert caught.value.field == f"--{together[0]}"
    assert refusal[1] in str(caught.value)
    for name in together:
        check_combination({other: field for other, field in given.items() if other != name})
        assert why_not(*(other for other in together if other != name)) == ""


def names_asked() -> Iterator[str]:
    """The names that the source asks the table about: keys of dicts, in modules that import it."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "kvarts.core.parts.combines" not in text and ".features" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_name_of_the_table_is_asked_about() -> None:
    """A row with a name that nothing asks about would never be raised."""
    asked = set(names_asked())
    assert {name for refusal in REFUSED for name in refusal.together} <= asked
