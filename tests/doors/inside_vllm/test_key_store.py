"""kvarts' tiers as vLLM's scheduler asks them, on real files, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvarts.core.tiers.keyed import KeyedTier, KeyState
from kvarts.core.tiers.pagefiles import PageFiles
from kvarts.doors.vllm.page_io import HostRegion, PageIo
from kvarts.doors.vllm.store import KeyStore, Reads

PAGE_BYTES = 64
KEYS = [bytes([number]) * 36 for number in range(20)]


class Opened:
    """Tiers of a few pages, with the bytes that a worker would copy."""

    def __init__(self, folder: Path, name: str, *, num_host: int, num_files: int, **settings: float) -> None:
        self.region = HostRegion(name, num_host, PAGE_BYTES)
        found = PageFiles(folder, max_bytes=1 << 20)
        files = KeyedTier(num_files)
        places, _ = files.place(found.keys())
        files.settle(places)
        self.page_io = PageIo(found, self.region)
        self.store = KeyStore(KeyedTier(num_host), files=files, page_io=self.page_io, tells=True, **settings)  # type: ignore[arg-type]
        self.told: dict[str, set[bytes]] = {"host": set(), "files": set()}
        """The pages that can be found in each tier, by the changes so far."""

    def put(self, keys: list[bytes]) -> bool:
        """Store pages, each of bytes of its own; return whether there was room for one."""
        placed = self.store.prepare_store(keys, keys, keys)
        if placed is None:
            return False
        for key, place in placed[0].items():
            self.region.write(place, payload_of(key))
        self.store.complete_store(placed[0], keys, keys)
        self.settle()
        return True

    def settle(self) -> None:
        """Wait for the files."""
        self.page_io.drain()
        self.store.poll()
        self.check_changes()

    def check_changes(self) -> None:
        """Assert that the changes report each page once when it is stored and once when it is gone."""
        for change in self.store.take_changes():
            told, keys = self.told[change.tier], set(change.keys)
            assert len(keys) == len(change.keys) and (keys <= told if change.is_removed else not keys & told)
            self.told[change.tier] = told - keys if change.is_removed else told | keys
        for name, tier in (("host", self.store.host), ("files", self.store.files)):
            assert tier is not None
            assert self.told[name] == {key for key in tier if tier.state(key) is KeyState.STORED}

    def get(self, keys: list[bytes]) -> list[bytes]:
        """Load as many of `keys`, from the first on, as are there."""
        reads = Reads()
        for key in keys:
            self.store.lookup(key, keys, reads)
        self.settle()
        found = []
        for key in keys:
            if self.store.lookup(key, keys, reads) is not KeyState.STORED:
                break
            found.append(key)
        places = self.store.prepare_load(found, reads)
        payloads = [self.region.read(place) for place in places]
        self.store.complete_load(found)
        self.store.end_reads(reads)
        assert payloads == [payload_of(key) for key in found]
        assert self.store.host.num_used == 0 and self.store.files is not None and self.store.files.num_used == 0
        self.store.host.check()
        self.store.files.check()
        self.check_changes()
        return found

    def close(self) -> None:
        self.store.close()
        self.region.unlink()


def payload_of(key: bytes) -> bytes:
    return (key * 2)[:PAGE_BYTES]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    tiers = Opened(tmp_path, f"test {tmp_path}", num_host=4, num_files=12)
    yield tiers
    tiers.close()


def test_pages_that_left_host_memory_come_from_files(opened: Opened) -> None:
    opened.put(KEYS[:4])
    opened.put(KEYS[4:8])
    assert opened.store.host.state(KEYS[0]) is KeyState.MISSING
    assert opened.get(KEYS[:4]) == KEYS[:4]
    assert opened.store.counts.promoted == 4 and opened.store.counts.written == 8


def test_files_are_bounded_and_lose_the_deepest_of_the_oldest(opened: Opened) -> None:
    for start in (0, 4, 8, 12):
        opened.put(KEYS[start : start + 4])
    assert opened.store.files is not None and len(opened.store.files) == 12
    opened.put(KEYS[16:18])
    assert opened.get(KEYS[4:8]) == KEYS[4:6]


def test_more_than_fits_is_found_as_far_as_there_is_room(opened: Opened) -> None:
    assert opened.put(KEYS[:6])
    assert opened.get(KEYS[:6]) == KEYS[:4]
    assert not opened.put(KEYS[:6])
    assert opened.put(KEYS[:4])  # nothing to do


def test_after_a_restart_pages_are_found(tmp_path: Path) -> None:
    first = Opened(tmp_path, f"first {tmp_path}", num_host=4, num_files=12)
    first.put(KEYS[:4])
    first.close()
    second = Opened(tmp_path, f"second {tmp_path}", num_host=4, num_files=12)
    assert second.get(KEYS[:4]) == KEYS[:4]
    second.close()


@pytest.mark.parametrize("damage", ["changed", "short", "gone"])
def test_a_broken_file_is_a_miss(tmp_path: Path, opened: Opened, damage: str) -> None:
    opened.put(KEYS[:4])
    opened.put(KEYS[4:8])
    path = tmp_path / KEYS[1].hex()[:2] / f"{KEYS[1].hex()}.kv"
    text = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(text[:-1] + (b"?" if damage == "changed" else b""))
    assert opened.get(KEYS[:4]) == KEYS[:1]
    assert opened.store.counts.broken == 1
    opened.settle()
    assert not path.exists()
    assert opened.get(KEYS[:4]) == KEYS[:1]


def test_a_disk_that_takes_nothing_leaves_host_memory(tmp_path: Path, opened: Opened) -> None:
    for key in KEYS[:4]:
        (tmp_path / key.hex()[:2]).write_text("in the way")
    opened.put(KEYS[:4])
    assert opened.store.counts.unwritten == 4 and opened.get(KEYS[:4]) == KEYS[:4]


def test_a_file_that_is_slower_than_computing_is_not_read(tmp_path: Path) -> None:
    tiers = Opened(tmp_path, f"slow {tmp_path}", num_host=4, num_files=12, compute_s=1e-9)
    tiers.put(KEYS[:4])
    tiers.put(KEYS[4:8])
    assert tiers.get(KEYS[:4]) == KEYS[:4]  # how long a read takes is not known yet
    tiers.put(KEYS[4:8])
    assert tiers.get(KEYS[:4]) == []
    assert tiers.store.counts.computed_instead > 0
    tiers.close()


def test_a_request_waits_no_longer_for_a_file_than_it_may(tmp_path: Path) -> None:
    tiers = Opened(tmp_path, f"late {tmp_path}", num_host=4, num_files=12, most_read_s=0.0)
    tiers.put(KEYS[:4])
    tiers.put(KEYS[4:8])
    with tiers.page_io._condition:  # the thread cannot begin
        reads = Reads()
        assert tiers.store.lookup(KEYS[0], KEYS[:1], reads) is KeyState.COMING
        assert tiers.store.lookup(KEYS[0], KEYS[:1], reads) is KeyState.MISSING
        tiers.store.end_reads(reads)
    tiers.settle()
    assert tiers.store.host.num_used == 0
    tiers.close()


def test_a_reset_deletes_everything(tmp_path: Path, opened: Opened) -> None:
    opened.put(KEYS[:4])
    opened.store.reset()
    opened.settle()
    assert opened.get(KEYS[:4]) == [] and not list(tmp_path.glob("??/*.kv"))


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(10))
def test_changes_report_what_can_be_found(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    tiers = Opened(tmp_path, f"law {tmp_path}", num_host=draw.randint(2, 6), num_files=draw.randint(2, 8))
    for number in range(60):
        start = draw.randrange(0, 20, 5)
        keys = KEYS[start : start + draw.randint(1, 5)]
        done = draw.random()
        if done < 0.5:
            tiers.put(keys)
        elif done < 0.9:
            tiers.get(keys)
        elif done < 0.96 and (paths := sorted(tmp_path.glob("??/*.kv"))):
            path = draw.choice(paths)
            path.write_bytes(path.read_bytes()[:-1])
        elif number > 40:
            tiers.store.reset()
            tiers.settle()
            assert tiers.told == {"host": set(), "files": set()}
        else:
            tiers.close()
            tiers = Opened(tmp_path, f"law {tmp_path}", num_host=draw.randint(2, 6), num_files=20)
            tiers.check_changes()
    tiers.close()
