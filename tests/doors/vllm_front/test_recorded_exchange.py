"""Messages of real front ends, recorded by scripts/record_front_end.py, are read and answered as recorded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.doors.vllm_front.protocol import ADD, ENGINE_CORE_DEAD, UTILITY, FrontRequest, known_versions, protocol_of

from builders.fake_front_end import front_end

FOLDER = Path(__file__).parent
WRITES = ("structured_outputs", "extra_args")
"""Sampling parameters that need llguidance."""


def messages(version: str, sender: str) -> list[list[bytes]]:
    lines = [json.loads(line) for line in (FOLDER / f"exchange-{version}.jsonl").read_text().splitlines()]
    return [[bytes.fromhex(frame) for frame in line["frames"]] for line in lines if line["from"] == sender]


def requests(version: str) -> list[FrontRequest]:
    protocol = protocol_of(version)
    return [protocol.request(payload) for kind, payload, *_ in messages(version, "front") if kind == ADD]


def tokens_by_request(version: str) -> dict[str, list[int]]:
    """Return the tokens of the recorded answers."""
    found: dict[str, list[int]] = {}
    for (payload,) in messages(version, "core")[1:]:
        for output in () if payload == ENGINE_CORE_DEAD else msgspec.msgpack.decode(payload)[1]:
            found.setdefault(output[0], []).extend(output[1])
    return found


@pytest.mark.parametrize("version", known_versions())
def test_requests_are_read(version: str) -> None:
    found = requests(version)
    sampling = [each.sampling_params or {} for each in found]
    assert [each["max_tokens"] for each in sampling][:4] == [3, 2, 2, 2]
    assert found[0].prompt_token_ids and all(isinstance(token, int) for token in found[0].prompt_token_ids)
    assert [each.request_id[:2] for each in found[1:3]] == ["0_", "1_"]
    assert found[1].external_req_id == found[2].external_req_id or found[1].external_req_id is not None
    assert [each["seed"] for each in sampling[1:3]] == [7, 8]
    assert [each["stop_token_ids"] for each in sampling[1:3]] == [[5], [5]]
    assert (sampling[3]["logprobs"], sampling[3]["prompt_logprobs"]) == (2, 2)
    assert [each.cache_salt for each in found if each.cache_salt] == ["tenant"]
    assert [each["extra_args"]["kvarts_answer"] for each in sampling if each.get("extra_args")] == ['{"text": "yes"}']
    constraints = [each["structured_outputs"] for each in sampling if each.get("structured_outputs")]
    assert len(constraints) == 2
    assert constraints[1]["regex"] == "[0-9]{3}"
    assert [each.lora_request.name for each in found if each.lora_request] == ["mine"]
    assert all(each.client_index == 0 and each.priority == 0 for each in found)


@pytest.mark.parametrize("version", known_versions())
def test_calls_are_answered(version: str, tmp_path: Path) -> None:
    names: list[str] = []
    with front_end(tmp_path, f"{version}.0") as (front, _):
        for kind, payload, *_ in messages(version, "front"):
            if kind == UTILITY:
                _, _, name, arguments = msgspec.msgpack.decode(payload)
                front.call(name, *arguments)
                names.append(name)
    assert {"reset_mm_cache", "get_supported_tasks", "add_lora", "reset_prefix_cache", "sleep", "wake_up",
            "resume_scheduler", "collective_rpc"} <= set(names)  # fmt: skip


@pytest.mark.parametrize("version", known_versions())
def test_answers_are_those_of_the_recording(version: str, tmp_path: Path) -> None:
    expected = tokens_by_request(version)
    can_write = find_spec("llguidance") is not None
    num_compared = 0
    with front_end(tmp_path, f"{version}.0") as (front, _):
        for kind, payload, *_ in messages(version, "front"):
            if kind != ADD:
                continue
            asked = front.protocol.request(payload)
            if not can_write and any((asked.sampling_params or {}).get(name) for name in WRITES):
                continue
            front.send(kind, payload)
            outputs = front.answers(asked.request_id)[asked.request_id]
            assert [token for each in outputs for token in each["new_token_ids"]] == expected[asked.request_id]
            num_compared += 1
    assert num_compared >= 7


@pytest.mark.parametrize("version", known_versions())
def test_ready_response_of_then_has_the_fields_of_now(version: str) -> None:
    told: dict[str, Any] = msgspec.msgpack.decode(messages(version, "core")[0][0])
    assert set(protocol_of(version).ready_fields) <= set(told)
