"""KV events of replays of several models on a device: each model has a stream, at the next port."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("zmq")

from test_sharing_groups_laws import Device, OneOf, devices

from kvarts import replay
from kvarts.core.events import Event
from kvarts.core.kv.groups import PartGroup
from kvarts.doors.kv_events.batches import Form
from kvarts.sim.sharing import replay as sharing_replay

from builders import preforked
from builders.case import Case, Row
from builders.grouped import FULL
from builders.kv_event_client import open_client
from builders.kv_events import GroupConsumer
from builders.ports import free_ports

Run = Callable[..., int]


class Follower(GroupConsumer):
    """Holds what the stream of one model says, and compares it with the cache of that model after each of its steps."""

    def __init__(self, groups: Sequence[PartGroup], form: Form) -> None:
        super().__init__(groups, form)
        self.cache: Any = None
        self.num_compared = 0

    def observe(self, events: Sequence[Event]) -> None:
        self.reader.observe(events)
        there = set()
        for group, content, start, end, _ in self.cache.runs():
            there |= {("GPU", group, name) for name in self.names.of(content)[start:end]}
        assert self.decoded == there
        self.num_compared += bool(there)


WITH_AND_WITHOUT_GROUPS = Device(
    [
        OneOf(Case([Row(0, [0], 1, 1, None, 0, None)], 1, 1, 1, 4, 1, "default", 1), groups, "all", 1)
        for groups in ((PartGroup(FULL, 1, 1),), ())
    ],
    1, 3, 1, 0.0,
)  # fmt: skip
"""Events in arrays name the group of the first model's blocks; those of the second model, none."""


@pytest.mark.laws
@example(WITH_AND_WITHOUT_GROUPS, "array")
@given(devices(), st.sampled_from(["map", "array"]))
def test_a_consumer_of_each_model_holds_what_that_model_holds(case: Device, form: Form) -> None:
    """Whatever others evict of it; and publishing changes nothing."""
    followers = {f"m{place}": Follower(model.kept, form) for place, model in enumerate(case.models)}
    open_tenant = sharing_replay.open_tenant

    def opened(config: Any, name: str, *args: Any, **options: Any) -> Any:
        tenant = open_tenant(config, name, *args, **options)
        followers[name].cache = tenant.cache
        return tenant

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing_replay, "open_tenant", opened)
        told = replay(case.traces, case.config(), observers_of=lambda name: [followers[name]])
    assert told.to_json() == case.run().to_json()


MODELS = ("--model", "chat=llama-3.1-8b", "--model", "code=gemma-3-12b", "--device", "h100-80gb")


def traffic(folder: Path) -> list[str | Path]:
    """Options with a trace for each model: prompts of units that the other does not have."""
    options: list[str | Path] = []
    for name, first in (("chat", 1), ("code", 100)):
        rows = [{"timestamp": 9 * n, "input_length": 600, "output_length": 3, "hash_ids": [first, first + 1 + n % 4]}
                for n in range(8)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options += ["--trace", f"{name}={folder / name}.jsonl"]
    return options


@pytest.mark.slow
def test_each_model_and_each_device_has_the_next_port(tmp_path: Path) -> None:
    """A topic names the model, and a batch the number of the device."""
    port, asked = free_ports(4), free_ports(4)
    events = ["--kv-events", f"tcp://127.0.0.1:{port}", "--set", f"kv_events_replay=tcp://127.0.0.1:{asked}"]
    events += ["--set", "kv_events_topic=kv@{model}", "--set", "kv_events_stay=20", "--replicas", "2"]
    told = {}
    with preforked.start("replay", *MODELS, *traffic(tmp_path), *events) as process:
        assert process.stderr is not None
        while "stay for" not in process.stderr.readline():
            pass
        for number in range(4):
            with open_client(f"tcp://127.0.0.1:{port + number}", f"tcp://127.0.0.1:{asked + number}") as client:
                told[number] = client.replay(0)
        process.kill()
        process.wait()
    groups: dict[int, set[Any]] = {}
    tokens: dict[int, set[Any]] = {}
    for number, batches in told.items():
        assert [seq for _, seq, _ in batches] == list(range(len(batches))) and batches
        assert {topic for topic, _, _ in batches} == {b"kv@chat" if number < 2 else b"kv@code"}
        decoded = [msgspec.msgpack.decode(payload) for _, _, payload in batches]
        assert {rank for _, _, rank in decoded} == {number % 2}
        stored = [each for _, of_batch, _ in decoded for each in of_batch if each["type"] == "BlockStored"]
        groups[number] = {each["group_idx"] for each in stored}
        tokens[number] = {token for each in stored for token in each["token_ids"]}
    assert groups == {0: {0}, 1: {0}, 2: {0, 1}, 3: {0, 1}}
    assert not (tokens[0] | tokens[1]) & (tokens[2] | tokens[3])


def test_ports_that_two_streams_would_have_are_refused(
    run_command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = ("--kv-events", "tcp://127.0.0.1:5557", "--set", "kv_events_replay=tcp://127.0.0.1:5558")
    assert run_command("replay", *MODELS, *traffic(tmp_path), *events) == 2
    said = capsys.readouterr().err
    assert "tcp://127.0.0.1:5558 would be of two engines: each has the next port" in said and "further apart" in said


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--kv-events", "tcp://127.0.0.1:65535"), "--kv-events"),
        (("--kv-events", "tcp://127.0.0.1:65533", "--replicas", 3), "--kv-events"),
        (
            ("--kv-events", "tcp://127.0.0.1:5557", "--set", "kv_events_replay=tcp://127.0.0.1:65535"),
            "--set kv_events_replay",
        ),
    ],
)
def test_a_model_without_a_port_is_refused_by_the_option(
    run_command: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], field: str
) -> None:
    assert run_command("replay", *MODELS, *traffic(tmp_path), *options) == 2
    assert capsys.readouterr().err.startswith(f"kvarts: {field}: ")


def test_a_replica_without_a_port_is_refused_by_the_option(
    run_command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "--replicas", 3, "--kv-events", "tcp://127.0.0.1:65534") == 2
    assert "kvarts: --kv-events: has no port for rank 2" in capsys.readouterr().err
