"""L6 and L2 with tiers below: a model that reads its pages, and pages that are really copied to other places and back.

Transfers end late, in part, twice, or not well; workers report in any order; requests are cancelled and preempted
meanwhile; tiers are reset. The output is that of an undisturbed run.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import EngineConfig
from kvarts.core.kv.transfer import Direction, TransferReport
from kvarts.core.sched.plan import StepPlan, StepResult
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import prepare_tiers
from kvarts.core.tiers.pagefiles import PageFiles, file_bytes

from builders.guesser import Guesser, guessers
from builders.serving import Arrival, output_of, serve, served
from builders.tiered_toy import TieredToy, busy, check_outputs, offloads
from builders.tiers import offloader_of
from builders.toy_model import generate

pytestmark = pytest.mark.laws


@given(served(), offloads(), st.integers(0, 1 << 30), st.booleans())
def test_outputs_equal_an_undisturbed_run(
    case: tuple[list[Arrival], EngineConfig], offload: OffloadConfig, seed: int, resets: bool
) -> None:
    """L1 to L3, L6 and L8, whatever becomes of transfers."""
    arrivals, config = case
    with TemporaryDirectory() as directory:
        files = PageFiles(directory, max_bytes=1 << 20) if offload.disk_pages else None
        check_outputs(arrivals, config, offload, Random(seed), resets=resets, files=files)


@given(served(), offloads(), st.integers(0, 1 << 30), guessers())
def test_drafts_change_nothing_with_tiers_below(
    case: tuple[list[Arrival], EngineConfig], offload: OffloadConfig, seed: int, guesser: Guesser
) -> None:
    """L1 to L3, L6 and L8: pages that accepted tokens fill are stored, and those of rejected ones never."""
    arrivals, config = case
    with TemporaryDirectory() as directory:
        files = PageFiles(directory, max_bytes=1 << 20) if offload.disk_pages else None
        check_outputs(arrivals, config, offload, Random(seed), files=files, drafter=guesser)


def test_a_page_goes_on_to_files_only_after_those_before_it() -> None:
    """A store that ends late: the device has evicted its page, and host memory has what follows it already."""
    arrivals = [Arrival(0, [0], 19, 0, None), Arrival(1, [0, 5, 3, 2, 5, 1], 15, 0, None)]
    config = EngineConfig(num_pages=37, page_size=1, max_num_batched_tokens=8, max_num_seqs=6)
    offload = OffloadConfig(host_pages=64, disk_pages=40, target_free=1, full_prompt_hits=True)
    with TemporaryDirectory() as directory:
        check_outputs(arrivals, config, offload, Random(12), files=PageFiles(directory, max_bytes=1 << 20))


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("policy", ["eager", "lazy", "exclusive"])
def test_pages_come_back_from_host_memory(policy: str, has_drafts: bool) -> None:
    """With drafts as well, whose tokens must not keep a tier from being read."""
    arrivals, config, offload = busy(policy)
    drafter = Guesser(0, wrong=0.3, most=3) if has_drafts else None
    engine, _ = check_outputs(arrivals, config, offload, Random(0), drafter=drafter)
    offloader = offloader_of(engine)
    assert offloader.counts.num_loads > 0
    assert offloader.counts.num_stores > 0


class ReadsElsewhere(TieredToy):
    """One load puts one page where another should be."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        for transfer in plan.transfers:
            if transfer.direction is Direction.LOAD and transfer.num_pages > 1:
                self.copier.run()
                self.pending = [TransferReport(number) for number in self.transfers]
                first, second = transfer.moves[0].target_ids[:2]
                assert not isinstance(first, bytes)
                assert not isinstance(second, bytes)
                pages = self.kv.reshape(2, -1, self.page_size)
                pages[:, first] = pages[:, second]
        return result


def test_a_page_copied_to_the_wrong_place_changes_the_output() -> None:
    """The negative control."""
    arrivals, config, offload = busy()
    executor = ReadsElsewhere(config, offload, Random(0))
    executor.fails = 0.0
    _, requests, _ = serve(arrivals, config, executor, tiers=partial(prepare_tiers, offload))
    assert [output_of(request) for request in requests] != [generate(a.prompt, a.num_output) for a in arrivals]


def test_what_a_load_evicts_is_stored_before_the_load_fills_its_place() -> None:
    """L6: executors copy in the order of transfers. The load keeps its number."""
    arrivals, config, offload = busy("exclusive")
    _, executor = check_outputs(arrivals, config, offload, Random(3))
    transfers = list(executor.transfers.values())
    pairs = [
        (store, load)
        for store, load in pairwise(transfers)
        if load.direction is Direction.LOAD and store.transfer_id == load.transfer_id + 1
    ]
    assert pairs
    assert all(store.direction is Direction.STORE for store, _ in pairs)


def test_files_survive_a_restart(tmp_path: Path) -> None:
    arrivals, config, offload = busy(disk_pages=64)
    files = PageFiles(tmp_path, max_bytes=1 << 20)
    check_outputs(arrivals, config, offload, Random(1), files=files)
    found = PageFiles(tmp_path, max_bytes=1 << 20)
    assert found.keys()
    assert sorted(found.keys()) == sorted(files.keys())
    engine, _ = check_outputs(arrivals[:1], config, offload, Random(2), files=found)
    assert offloader_of(engine).counts.num_loads == 1


@pytest.mark.parametrize("damage", ["truncated", "changed", "foreign", "gone"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    arrivals, config, offload = busy(disk_pages=64)
    check_outputs(arrivals, config, offload, Random(1), files=PageFiles(tmp_path, max_bytes=1 << 20))
    for path in sorted(tmp_path.glob("*/*.kv")):
        text = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(text[:-1])
        elif damage == "changed":
            path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
        elif damage == "foreign":
            path.write_bytes(text[: file_bytes(32, 0) - 24] + np.zeros(6).tobytes())
    found = PageFiles(tmp_path, max_bytes=1 << 20)
    if damage == "gone":
        for path in sorted(tmp_path.glob("*/*.kv")):
            path.unlink()
    engine, _ = check_outputs(arrivals[:1], config, offload, Random(2), files=found)
    assert offloader_of(engine).counts.num_failed >= 1


def test_files_keep_their_byte_limit(tmp_path: Path) -> None:
    arrivals, config, offload = busy(disk_pages=64)
    size = file_bytes(32, 2 * config.page_size * 8)
    files = PageFiles(tmp_path, max_bytes=5 * size)
    check_outputs(arrivals, config, offload, Random(1), files=files)
    assert files.num_bytes <= 5 * size
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) == files.num_bytes
