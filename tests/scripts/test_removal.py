"""What the deletion drills remove of a source, and what they refuse."""

from __future__ import annotations

from textwrap import dedent

import pytest

from removal import CannotRemoveError, Gone, imports_gone, without, without_listed

GONE = Gone(("kvarts.record",), frozenset({"record", "record_table"}), frozenset({"Timeline"}))


def left(source: str) -> str:
    """What is left of `source`."""
    return without(dedent(source), GONE)


def assert_left(source: str, expected: str) -> None:
    assert left(source) == dedent(expected)


def test_imports_go_and_their_neighbours_stay() -> None:
    assert_left(
        """\
        import kvarts.record.journal
        import kvarts.recorder
        from kvarts.cli import record
        from kvarts.cli.record_table import table
        from kvarts.cli import (
            options,
            record as _record,
        )
        from kvarts.record import journal
        """,
        """\
        import kvarts.recorder
        from kvarts.cli import (
            options,
        )
        """,
    )


def test_rows_of_tables_go() -> None:
    assert_left(
        """\
        PARTS: tuple[str, ...] = (
            "offload",
            "record",  # a remark
        )
        HOMES = {
            "Timeline": "kvarts.record.timeline",
            "replay": "kvarts.sim.replay",
            "old": {
                "kvarts.record.live": (
                    "Live",
                ),
                "kvarts.recorder": ("é", "record"),
            },
        }
        """,
        """\
        PARTS: tuple[str, ...] = (
            "offload",
        )
        HOMES = {
            "replay": "kvarts.sim.replay",
            "old": {
                "kvarts.recorder": ("é", "record"),
            },
        }
        """,
    )


def test_statements_and_decorators_that_use_the_module_go_as_a_whole() -> None:
    assert_left(
        """\
        from kvarts.cli import record

        @record.option
        @other
        def command(value):
            '''Speaks of kvarts.record.'''
            value.live = record.open_live(
                value,
            )
            value += import_module("kvarts.record.timeline").extra
            return value
        """,
        """\

        @other
        def command(value):
            '''Speaks of kvarts.record.'''
            return value
        """,
    )


def test_a_block_that_is_left_empty_goes_with_its_head() -> None:
    assert_left(
        """\
        if TYPE_CHECKING:
            from kvarts.record.live import LiveTimeline
        if html:
            from kvarts.cli import record
            show(html)
        """,
        """\
        if html:
            show(html)
        """,
    )


def test_a_name_that_is_no_module_stays() -> None:
    source = 'record = param.get("record")\nprint(record, "--record", "kvarts.recorder")\n'
    assert left(source) == source


@pytest.mark.parametrize(
    "source",
    [
        "from kvarts.cli import options, record\n",
        "from kvarts.cli import record\nif record.is_on:\n    go()\n",
        "from kvarts.cli import record\ndef f(x=record.DEFAULT):\n    go()\n",
        "if x:\n    from kvarts.record import journal\nelse:\n    go()\n",
        "from kvarts.record import journal\n",
    ],
)
def test_what_cannot_be_taken_apart_is_refused(source: str) -> None:
    with pytest.raises(CannotRemoveError):
        left(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import kvarts.record.journal", True),
        ("def test():\n    from kvarts.record import journal", True),
        ("from kvarts import replay, Timeline", True),
        ("import kvarts\nkvarts.Timeline()", True),
        ("from kvarts.cli.record import open_live", True),
        ("import kvarts\nkvarts.replay()", False),
        ("from kvarts.recorder import x", False),
        ("from kvarts.executor import record", False),
    ],
)
def test_modules_that_import_what_is_gone(source: str, expected: bool) -> None:
    assert imports_gone(source, GONE) is expected


def test_modules_go_from_lists_of_settings() -> None:
    settings = dedent(
        """
        # "kvarts.record.journal",
        modules = [
            "kvarts.record.journal",
            "kvarts.recorder",
            "kvarts.record",
        ]
        name = "kvarts.record"
        """
    )
    left = without_listed(settings, Gone(("kvarts.record",)))
    assert left.splitlines() == [
        "", '# "kvarts.record.journal",', "modules = [", '    "kvarts.recorder",', "]", 'name = "kvarts.record"'
    ]  # fmt: skip
