"""What a killed process was writing is removed by the next one, and nothing else is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvarts.base import leftovers
from kvarts.base.files import whole_file, write_whole
from kvarts.base.leftovers import temporary_folder

WRITER = """
import sys, time
from pathlib import Path
from kvarts.base.files import whole_file
from kvarts.base.leftovers import temporary_folder
with whole_file(Path(sys.argv[1], "out")) as file, temporary_folder() as folder:
    file.write(b"half")
    file.flush()
    Path(folder, "inside").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is also the one for temporary folders, in which nothing was looked for yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(leftovers, "_looked_at", set())
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_leftovers_of_a_killed_process_go_those_of_a_living_one_and_of_others_stay(here: Path) -> None:
    (here / "kvarts-releases").mkdir()  # 8 letters, as in a temporary name
    (here / ".kvarts-0123456789abcdef.bak").touch()
    (here / ".kvarts-0123456789abcdeg").touch()
    (here / ".kvarts-0123456789abcdef").mkdir()
    others = names(here)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(here)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        folder = Path(writer.stdout.readline().strip())
        assert folder.parent == here
        write_whole(here / "mine", b"1")
        with temporary_folder():
            pass
        assert len(names(here)) == len(others) + 3, "the file and the folder of the living process, and mine"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    leftovers._looked_at.clear()
    write_whole(here / "mine", b"2")
    with temporary_folder() as own:
        assert not folder.exists() and own.exists()
    assert names(here) == sorted([*others, "mine"])


def test_a_file_that_this_process_is_writing_is_no_leftover(here: Path) -> None:
    with whole_file(here / "one") as one:
        one.write(b"1")
        leftovers._looked_at.clear()
        write_whole(here / "two", b"2")
    assert names(here) == ["one", "two"]
