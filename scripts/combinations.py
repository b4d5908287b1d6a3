"""Write the tables of what combines into docs/limits.md, from `kvarts.core.parts.combines`.

python scripts/combinations.py
"""

from __future__ import annotations

from pathlib import Path

from kvarts.core.parts.combines import FEATURES, PLACES, REFUSED, Refusal, sentence

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"
BEGIN, END = "<!-- combinations: made by scripts/combinations.py -->\n", "<!-- end of combinations -->\n"


def cell(feature: str, place: str) -> str:
    """Return whether a feature works in a place, with the numbers of the refusals that concern it there."""
    notes = [number for number, refusal in enumerate(REFUSED, 1) if _is_about(refusal, feature, place)]
    for number, refusal in enumerate(REFUSED, 1):
        if set(refusal.together) in ({feature, place}, {FEATURES[feature].part_of, place}):
            return f"refused ({number})"
    if place not in FEATURES[feature].places:
        return "-"
    return "works" if not notes else f"works, but {', '.join(map(str, notes))}"


def _is_about(refusal: Refusal, feature: str, place: str) -> bool:
    """Return whether a refusal is of `feature`, and can be met in `place`."""
    named = [name for name in refusal.together if name in PLACES]
    others = [name for name in refusal.together if name in FEATURES]
    if feature not in others or (named and place not in named):
        return False
    return bool(named) or all(place in FEATURES[name].places for name in others)


def tables() -> str:
    """Return both tables: features by places, and the refusals by their numbers."""
    titles = [words.removeprefix("a ") for words in PLACES.values()]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(PLACES) + 1) + "|"]
    for name, feature in FEATURES.items():
        lines.append(f"| {feature.words} | {' | '.join(cell(name, place) for place in PLACES)} |")
    lines += ["", "| | refused together, and why |", "|---|---|"]
    lines += [f"| {number} | {sentence(refusal)} |" for number, refusal in enumerate(REFUSED, 1)]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the text of a page with the tables of today in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
