"""Weights in huge pages: the same numbers elsewhere, and only where the system and the environment allow it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kvarts.run.torch import huge_pages
from kvarts.run.torch.huge_pages import FEW_BYTES, SETTING, allocate, use_huge_pages
from kvarts.run.torch.packing import pack_linears, pack_together

ROWS, COLUMNS = 2048, 4096

needs_huge_pages = pytest.mark.skipif(not huge_pages._page_bytes(), reason="this system has no huge pages")


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """Two matrices of one input, 32 MiB in bfloat16, and an embedding as large."""

    def __init__(self, dtype: torch.dtype, rows: int = ROWS) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(ROWS, 2 * COLUMNS, dtype=dtype)
        self.gate = torch.nn.Linear(COLUMNS, rows, bias=False, dtype=dtype)
        self.up = torch.nn.Linear(COLUMNS, rows, bias=False, dtype=dtype)
        self.device, self.dtype = torch.device("cpu"), dtype


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")


def huge_bytes(address: int) -> int:
    """Return the bytes in huge pages of the mapping that has `address`."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            is_there = int(first, 16) <= address < int(last, 16)
        elif is_there and name == "AnonHugePages:":
            return int(values[0]) << 10
    return 0


@needs_huge_pages
def test_weights_are_moved_and_stay_the_same() -> None:
    model = Decoder(torch.float32)
    before = [one.detach().clone() for one in model.parameters()]
    num_bytes = use_huge_pages(model)
    weights = [model.gate.weight, model.up.weight]
    size = huge_pages._page_bytes()
    # But for parts of pages at both ends, and the embedding.
    assert sum(one.nbytes - 2 * size for one in weights) <= num_bytes <= sum(one.nbytes for one in weights) + size
    assert all(huge_bytes(one.data_ptr() + one.nbytes // 2) > 0 for one in weights)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@needs_huge_pages
@pytest.mark.parametrize("is_merged", [False, True])
def test_packed_weights_are_found(is_merged: bool) -> None:
    model = Decoder(torch.bfloat16)
    expected = model.gate.weight.detach().clone()
    if not pack_linears(model):
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    if is_merged:
        pack_together(model, ("gate", "up"))
    assert use_huge_pages(model) >= FEW_BYTES - 4 * huge_pages._page_bytes()
    packed = model.gate.whole.weight()[:ROWS] if is_merged else model.gate.weight()
    assert torch.equal(packed, expected)


def test_tensors_that_share_memory_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "SHARED_BYTES", 4096)
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    wanted = {f"{n}": ((n * 7 % 40 + 1, 3), kinds[n % 3]) for n in range(60)} | {"large": ((5000,), torch.float32)}
    made = allocate(wanted)
    assert {name: (tuple(one.shape), one.dtype) for name, one in made.items()} == wanted
    for number, one in enumerate(made.values()):
        one.fill_(number)
    assert all(bool((one == number).all()) for number, one in enumerate(made.values()))
    assert all(one.data_ptr() % 64 == 0 and one.is_contiguous() for one in made.values())
    assert 1 < len({one.untyped_storage().data_ptr() for one in made.values()}) < 30


def test_small_models_stay_where_they_are() -> None:
    assert use_huge_pages(Decoder(torch.bfloat16, rows=ROWS // 2)) == 0


@pytest.mark.parametrize("enabled", ["always madvise [never]\n", None])
def test_a_system_without_them_is_not_asked(
    enabled: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(huge_pages, "SYSTEM", tmp_path)
    assert use_huge_pages(Decoder(torch.float32)) == 0


def test_the_environment_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "0")
    assert use_huge_pages(Decoder(torch.float32)) == 0


@pytest.mark.parametrize(("said", "expected"), [(None, "1"), ("0", "0")])
def test_pytorch_is_asked_unless_the_environment_says_otherwise(said: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    ran = subprocess.run(
        [sys.executable, "-c", f"import kvarts.run.torch, os; print(os.environ[{SETTING!r}])"],
        env=environment | ({} if said is None else {SETTING: said}),
        capture_output=True,
        check=True,
        text=True,
    )
    assert ran.stdout.strip() == expected
