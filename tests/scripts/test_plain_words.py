"""The counter of turns of phrase finds each of them, and nothing in code; budgets only fall."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import plain_words  # noqa: E402

EXAMPLES = {
    "what as a noun": "It returns what the cache has.",
    "beside": "The pages beside it.",
    "fronted of": "Of two requests the first.",
    "of which": "Pages, some of which are full.",
    "per step": "It takes 12 pages a step.",
    "says": "The file says so.",
    "has no": "It has no pages.",
    "alike": "All are alike.",
    "goes": "The oldest page goes first.",
}


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_each_turn_is_found(text: str) -> None:
    room = plain_words.Room()
    room.read(Path("a.py"), 1, text)
    assert room.num_hits >= 1 and room.rate == 1000 * room.num_hits / room.num_words


def test_code_strings_tables_and_quotes_do_not_count() -> None:
    source = 'x = "what it says"  # a plain comment\n\n\ndef f():\n    """Return `what it says`."""\n'
    texts = list(plain_words.texts_of(source))
    assert sorted(text for _, text in texts) == ["Return `what it says`.", "a plain comment"]
    room = plain_words.Room()
    for line, text in texts:
        room.read(Path("a.py"), line, text)
    page = "Plain.\n```sh\nwhat it says\n```\n| what it says |\n\nIt says so.\n"
    room.read(Path("a.md"), 1, plain_words.prose_of(page))
    assert room.lines == {Path("a.md"): ["7: code that says or tells: says"]}


def test_budgets_only_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_words, "BUDGETS", tmp_path / "budgets.toml")
    plain_words.BUDGETS.write_text("# Budgets.\nclean = 9.0\ndirty = 2.0\n")
    rooms = {"clean": plain_words.Room(1000, 1), "dirty": plain_words.Room(1000, 3)}
    budgets = {"clean": 9.0, "dirty": 2.0}
    assert len(plain_words.faults(rooms, budgets)) == 2
    plain_words.write(rooms, budgets)
    assert plain_words.BUDGETS.read_text() == "# Budgets.\nclean = 3.0\ndirty = 2.0\n"
    (fault,) = plain_words.faults(
        {**rooms, "dirty": plain_words.Room(1000, 2)}, {"clean": 3.0, "dirty": 2.0, "gone": 1}
    )
    assert fault.startswith("gone is not there")
    (fault,) = plain_words.faults({"new": plain_words.Room(10, 0)}, {})
    assert fault.startswith("new has no budget")
