"""The scripts of examples/traces: what they write is read as a naive reader reads their input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvarts.base.errors import InputError
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace

from oracles.naive_forms import NaiveRequest, naive_hits, naive_requests

HERE = Path(__file__).parent / "forms" / "converted"
SCRIPTS = Path(__file__).parents[3] / "examples" / "traces"
SIZES = {"lmcache.jsonl": 256, "tair.jsonl": 16, "tair-tokens.jsonl": 1, "llmservingsim.jsonl": 1}
FILES = sorted(path.name for path in HERE.iterdir())


def script_of(name: str) -> str:
    return f"{name.partition('.')[0].partition('-')[0]}.py"


def run(script: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def converted(name: str, to: Path) -> Trace:
    result = run(script_of(name), HERE / name)
    assert result.returncode == 0, result.stderr
    to.write_text(result.stdout)
    return load_trace(to, trace_block_size=SIZES.get(name))


@pytest.mark.parametrize("name", FILES)
def test_sums_and_hits_are_those_of_a_naive_reader(name: str, tmp_path: Path) -> None:
    trace, naive = converted(name, tmp_path / "t.jsonl"), naive_requests(HERE / name)
    report = replay(trace, ReplayConfig(num_pages=100_000, page_size=4, concurrency=1))
    summary = report.summary
    requests = sorted((len(each.prompt), each.num_output) for each in naive)
    assert sorted((each.num_prompt_tokens, each.num_output_tokens) for each in trace) == requests
    assert summary["num_cached_tokens"] == naive_hits(_in_order(naive, trace), 4)
    assert trace.knows_prefixes or not naive_hits(naive, 4)


def _in_order(naive: list[NaiveRequest], trace: Trace) -> list[NaiveRequest]:
    """Return the naive requests in the order of the rows, which is that of arrivals: lengths tell them apart."""
    by_lengths = {(len(each.prompt), each.num_output): each for each in naive}
    assert len(by_lengths) == len(naive)
    return [by_lengths[each.num_prompt_tokens, each.num_output_tokens] for each in trace]


def test_times_and_turns_are_those_of_the_files(tmp_path: Path) -> None:
    ns = {name: [each.arrival_ns for each in converted(name, tmp_path / "t.jsonl")] for name in FILES}
    assert ns["vidur.csv"] == [0, 4_314_579_000, 4_541_877_000]
    assert ns["vidur-lengths.csv"] == [0, 0]
    assert ns["splitwise.csv"] == [0, 2_500_000_000, 3_000_000_000]
    assert ns["tair.jsonl"] == [0, 5_123_456_000]
    assert ns["lmcache.jsonl"] == pytest.approx([0, 1_377_000_000, 1_877_000_000], abs=500)  # seconds since 1970
    turns = [(each.session_id, each.delay_ns) for each in converted("llmservingsim.jsonl", tmp_path / "t.jsonl")]
    assert turns == [("s0", None), ("s0", 127_348_767), (None, None), (None, None), (None, None)]


@pytest.mark.parametrize("name", FILES)
def test_such_a_file_is_refused_with_the_script_that_converts_it(name: str) -> None:
    with pytest.raises(InputError) as caught:
        load_trace(HERE / name)
    assert f"Convert it: python examples/traces/{script_of(name)} {HERE / name}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "says"),
    [
        ("vidur.csv", "396,109", "x,109", 3, "could not convert"),
        ("splitwise.csv", "1,2048,8", "2,2048,8", 3, "batch_size: must be 1"),
        ("servegen.jsonl", '"timestamp": 0.5', '"time": 0.5', 2, "'timestamp' is missing"),
        ("lmcache.jsonl", '"seq_len": 1024', '"seq_len": 2048', 2, "4 ids, and 2048 tokens"),
        ("lmcache.jsonl", '"chunk_size": 256, "seq_len": 300', '"chunk_size": 128, "seq_len": 300', 3, "chunk_size"),
        ("tair-tokens.jsonl", "1704081605.123456", "-1", 2, "-1 is before 0"),
        ("tair.jsonl", '"input_len": 48', '"input_len": 480', 2, "3 ids, and 480 tokens"),
        ("llmservingsim.jsonl", '"input_toks": 30', '"input_toks": 31', 2, "input_tok_ids: has 30 ids"),
    ],
)
def test_a_malformed_record_is_named_by_its_line(
    name: str, old: str, new: str, line: int, says: str, tmp_path: Path
) -> None:
    text = (HERE / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    result = run(script_of(name), path)
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.startswith(f"{path}:{line}: ") and says in result.stderr


def test_each_script_is_listed_and_tested() -> None:
    scripts = {path.name for path in SCRIPTS.glob("*.py")} - {"mooncake_rows.py"}
    assert scripts == {script_of(name) for name in FILES}
    readme = (SCRIPTS / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in scripts)
