"""The core behind a front end of vLLM, whose side of the protocol is played here."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.doors.vllm_front.core import Behind
from kvarts.doors.vllm_front.link import Addresses, Link
from kvarts.doors.vllm_front.model import FrontModel
from kvarts.doors.vllm_front.opening import FrontSettings
from kvarts.doors.vllm_front.protocol import MediaFeature, known_versions, protocol_of, with_media

from builders.fake_front_end import ENGINE, FakeFrontEnd, front_end
from builders.tiny_model import tiny_model

PROMPT = list(range(300, 370))
VERSIONS = [f"{version}.0" for version in known_versions()]


def tokens_of(outputs: list[dict[str, Any]]) -> list[int]:
    return [token for output in outputs for token in output["new_token_ids"]]


def array_in(encoded: Any) -> Any:
    dtype, shape, data = encoded
    return np.frombuffer(data.data, dtype).reshape(shape)


@pytest.mark.parametrize("version", VERSIONS)
def test_handshake_states_all_that_a_front_end_needs(tmp_path: Path, version: str) -> None:
    with front_end(tmp_path, version) as (front, _):
        assert front.hello == {"status": "HELLO", "local": False, "headless": True}
        assert front.ready == {"status": "READY", "local": False, "headless": True}
        assert set(front.protocol.ready_fields) <= set(front.told)
        assert front.told["num_gpu_blocks"] == 64
        assert front.told["max_model_len"] == 1024
        assert front.call("get_supported_tasks") == ["generate"]


@pytest.mark.parametrize("version", VERSIONS)
def test_request_gets_its_tokens_one_per_step_and_its_reason(tmp_path: Path, version: str) -> None:
    with front_end(tmp_path, version) as (front, core):
        front.add("a", PROMPT)
        outputs = front.answers("a")["a"]
        assert [len(output["new_token_ids"]) for output in outputs] == [1, 1, 1, 1]
        assert outputs[-1]["finish_reason"] == 1
        assert all(output.get("finish_reason") is None for output in outputs[:-1])
        assert set(tokens_of(outputs)) <= {int(token) for token in core.model._ids}
        first = outputs[0]
        assert first["prefill_stats"]["num_cached_tokens"] == 0
        (_, queued), (_, scheduled) = (each.values() for each in first["events"])
        assert [each["type"] for each in first["events"]] == [1, 2]
        assert queued <= scheduled


def test_same_prompt_hits_its_full_pages(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        front.add("a", PROMPT)
        first = front.answers("a")["a"]
        front.add("b", PROMPT)
        again = front.answers("b")["b"]
        assert tokens_of(first) == tokens_of(again)
        assert again[0]["prefill_stats"]["num_cached_tokens"] == 64
        assert again[0]["prefill_stats"]["num_computed_tokens"] == 6
        front.add("c", PROMPT, cache_salt="other")
        assert front.answers("c")["c"][0]["prefill_stats"]["num_cached_tokens"] == 0
        front.add("d", PROMPT, lora_request=["adapter", 1, "path"])
        assert front.answers("d")["d"][0]["prefill_stats"]["num_cached_tokens"] == 0


def test_statistics_add_up_and_end_with_an_idle_engine(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        seen: dict[str, int] = {}
        for name in "ab":
            front.add(name, PROMPT)
            while True:
                outputs = front.outputs()
                stats = outputs["scheduler_stats"]
                for key, count in (stats.get("prefix_cache_stats") or {}).items():
                    seen[key] = seen.get(key, 0) + count
                if any(each.get("finish_reason") is not None for each in outputs["outputs"]):
                    break
        assert seen == {"requests": 2, "queries": 140, "hits": 64}
        assert (stats["num_running_reqs"], stats["num_waiting_reqs"], stats["kv_cache_usage"]) == (0, 0, 0.0)


def test_times_are_those_of_the_model_however_late_the_machine_is(tmp_path: Path) -> None:
    with front_end(tmp_path, speedup=10.0) as (front, _):
        front.add("a", PROMPT, sampling_params={"max_tokens": 21, "ignore_eos": True})
        times: list[float] = []
        while len(times) < 21:
            outputs = front.outputs()
            times += [outputs["timestamp"]] * len(outputs["outputs"])
        assert times[-1] - times[0] == pytest.approx(0.002, rel=1e-6), "20 steps of 1 ms, ten times as fast"


def test_end_tokens_are_of_the_request_or_the_model(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, core):
        front.add("a", PROMPT)
        tokens = tokens_of(front.answers("a")["a"])
        front.add("b", PROMPT, sampling_params={"max_tokens": 4, "ignore_eos": True, "stop_token_ids": [tokens[1]]})
        stopped = front.answers("b")["b"]
        assert tokens_of(stopped) == tokens[:2]
        assert (stopped[-1]["finish_reason"], stopped[-1]["stop_reason"]) == (0, tokens[1])
        front.add("c", PROMPT, sampling_params={"max_tokens": None})
        ended = front.answers("c")["c"]
        assert ended[-1]["finish_reason"] == 0
        assert tokens_of(ended)[-1] == core.model.end_id
        assert 64 <= len(tokens_of(ended)) <= 192
        front.add("d", PROMPT, sampling_params={})
        assert len(tokens_of(front.answers("d")["d"])) == 16


def test_choices_differ_and_a_seed_repeats(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        for name in ("0_x", "1_x"):
            front.add(name, PROMPT, external_req_id="x")
        found = front.answers("0_x", "1_x")
        assert tokens_of(found["0_x"]) != tokens_of(found["1_x"])
        for name in "ab":
            front.add(name, PROMPT, sampling_params={"max_tokens": 4, "seed": 5, "ignore_eos": True})
        found = front.answers("a", "b")
        assert tokens_of(found["a"]) == tokens_of(found["b"])


def test_logprobs_have_the_token_first(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        sampling = {"max_tokens": 2, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 1}
        front.add("a", PROMPT, sampling_params=sampling)
        outputs = front.answers("a")["a"]
        for output in outputs:
            ids, values, ranks = map(array_in, output["new_logprobs"][:3])
            assert ids.shape == values.shape == (1, 4)
            assert ids[0, 0] == output["new_token_ids"][0]
            assert ranks.shape == (1,)
            assert (values < 0).all()
        ids, values, _ = map(array_in, outputs[0]["new_prompt_logprobs_tensors"][:3])
        assert ids.shape == values.shape == (len(PROMPT) - 1, 2)
        assert ids[:, 0].tolist() == PROMPT[1:]
        assert outputs[1].get("new_prompt_logprobs_tensors") is None


def test_abort_frees_the_pages_without_an_answer(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        front.add("a", PROMPT, sampling_params={"max_tokens": 900, "ignore_eos": True})
        assert front.outputs()["outputs"]
        front.abort("a", "unknown")
        stats = front.stats_when(lambda stats: stats["num_running_reqs"] == 0)
        assert stats["kv_cache_usage"] == 0.0
        front.add("b", PROMPT)
        assert all(name == "b" for name in front.answers("b"))


def test_requests_are_preempted_and_say_so(tmp_path: Path) -> None:
    config = msgspec.structs.replace(ENGINE, num_pages=16)
    with front_end(tmp_path, config=config) as (front, _):
        names = ["a", "b", "c"]
        for place, name in enumerate(names):
            prompt = list(range(100 * place, 100 * place + 60))
            front.add(name, prompt, sampling_params={"max_tokens": 100, "ignore_eos": True})
        found = front.answers(*names)
        events = [each["type"] for name in names for output in found[name] for each in output.get("events") or ()]
        assert events.count(1) == events.count(2) == 3
        assert events.count(3) >= 1
        assert all(len(tokens_of(found[name])) == 100 for name in names)


def test_priority_lets_a_later_request_start_first(tmp_path: Path) -> None:
    config = msgspec.structs.replace(ENGINE, max_num_seqs=1)
    with front_end(tmp_path, config=config) as (front, _):
        for name, priority in (("a", 0), ("b", 5), ("c", -5)):
            prompt = [ord(name)] * 20
            front.add(name, prompt, priority=priority, sampling_params={"max_tokens": 20, "ignore_eos": True})
        found = front.answers("a", "b", "c")
        started = {name: found[name][0]["events"][1]["timestamp"] for name in "abc"}
        assert started["c"] < started["b"]


def test_embedding_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    behind = Behind(max_model_len=1024, task="embed")
    with front_end(tmp_path, behind=behind) as (front, _):
        assert front.call("get_supported_tasks") == ["embed"]
        vectors = []
        for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", PROMPT[::-1])):
            front.add(name, prompt, sampling_params=None, pooling_params=[True, None, None, None, "embed"])
            (output,) = front.answers(name)[name]
            assert (output["finish_reason"], output["new_token_ids"]) == (0, [])
            dtype, shape, data = output["pooling_output"]
            assert (dtype, shape) == ("float32", [256])
            vectors.append(np.frombuffer(data.data, "<f4"))
        assert np.array_equal(vectors[0], vectors[1])
        assert not np.array_equal(vectors[0], vectors[2])
        assert float(np.linalg.norm(vectors[0])) == pytest.approx(1.0, abs=1e-5)


# Calls ------------------------------------------------------------------------------------------------------


def test_sleep_ends_requests_and_empties_the_cache(tmp_path: Path) -> None:
    with front_end(tmp_path, "0.32.0") as (front, _):
        front.add("a", PROMPT)
        front.answers("a")
        front.add("long", PROMPT, sampling_params={"max_tokens": 900, "ignore_eos": True})
        front.call("sleep", 1, "abort")
        assert front.call("is_sleeping") is True
        front.add("b", PROMPT)  # waits
        assert front.call("is_scheduler_paused") is True
        front.send(b"\x03", msgspec.msgpack.encode([0, 99, "wake_up", [None]]))
        assert front.answers("b")["b"][0]["prefill_stats"]["num_cached_tokens"] == 0
        assert front.call("is_sleeping") is False


def test_sleep_tells_the_front_end_what_it_aborts(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        front.add("a", PROMPT, sampling_params={"max_tokens": 900, "ignore_eos": True})
        front.outputs()
        front.send(b"\x03", msgspec.msgpack.encode([0, 1, "sleep", [1, "abort"]]))
        assert front.answers("a")["a"][-1]["finish_reason"] == 2


def test_paused_engine_of_0_33_refuses_what_may_be_tried_again(tmp_path: Path) -> None:
    with front_end(tmp_path, "0.33.0") as (front, _):
        front.call("pause_generation", "wait", False)
        front.add("a", PROMPT)
        (output,) = front.answers("a")["a"]
        assert output["finish_reason"] == 3
        assert output["error"]["retryable"] is True
        front.call("resume_scheduler")
        front.add("b", PROMPT)
        assert len(front.answers("b")["b"]) == 4


def test_pause_that_keeps_requests_freezes_them(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, core):
        front.add("a", PROMPT, sampling_params={"max_tokens": 200, "ignore_eos": True})
        front.outputs()
        front.call("pause_scheduler", "keep", False)
        begun_ns = core.host.loop.call(lambda _: core.host.clock.now_ns())
        sleep(0.15)
        with suppress(zmq.Again):
            front.outputs(1)  # of a step that was under way
        with pytest.raises(zmq.Again):
            front.outputs(100)
        assert core.host.loop.call(lambda _: core.host.clock.now_ns()) > begun_ns
        front.send(b"\x03", msgspec.msgpack.encode([0, 1, "resume_scheduler", []]))
        begun_s = monotonic()
        assert front.answers("a")["a"][-1]["finish_reason"] == 1
        assert monotonic() - begun_s > 0.05, "it does not catch up with the time of the pause"


def test_pause_that_waits_is_answered_when_requests_have_ended(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        front.add("a", PROMPT, sampling_params={"max_tokens": 50, "ignore_eos": True})
        front.outputs()
        front.send(b"\x03", msgspec.msgpack.encode([0, 5, "pause_scheduler", ["wait", True]]))
        num_tokens, answered = 1, False
        while not answered:
            outputs = front.outputs()
            num_tokens += sum(len(each["new_token_ids"]) for each in outputs["outputs"])
            answered = outputs.get("utility_output") is not None
        assert num_tokens >= 49


def test_reset_prefix_cache_and_adapters_and_the_free_channel(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, _):
        front.add("a", PROMPT)
        front.answers("a")
        assert front.call("reset_prefix_cache", False, False) is True
        front.add("b", PROMPT)
        assert front.answers("b")["b"][0]["prefill_stats"]["num_cached_tokens"] == 0
        assert front.call("add_lora", ["adapter", 3, "path"]) is True
        assert front.call("list_loras") == [3]
        assert front.call("remove_lora", 3) is True
        assert front.call("collective_rpc", "check", None, [], None) == ["ok"]
        with pytest.raises(RuntimeError, match="nothing is not a method"):
            front.call("collective_rpc", "nothing", None, [], None)
        with pytest.raises(RuntimeError, match="save_sharded_state is not a call"):
            front.call("save_sharded_state", "x")
        for arguments in ([], [["adapter"]]):
            with pytest.raises(RuntimeError, match="add_lora"):
                front.call("add_lora", *arguments)
        with pytest.raises(RuntimeError, match="collective_rpc"):
            front.call("collective_rpc", "fail", None, [5], None)
        assert front.call("collective_rpc", "check") == ["ok"]


# Failures and ends ------------------------------------------------------------------------------------------


def test_failures_on_purpose(tmp_path: Path) -> None:
    with front_end(tmp_path, fail="1: 503; 2: 400; 3: stall 0.2s; 5: die") as (front, core):
        front.add("a", PROMPT)
        (output,) = front.answers("a")["a"]
        assert (output["finish_reason"], output["error"]["retryable"]) == (3, True)
        front.add("b", PROMPT)
        assert front.answers("b")["b"][0]["error"]["code"] == "validation_error"
        begun_s = monotonic()
        front.add("c", PROMPT)
        assert front.answers("c")["c"]
        assert monotonic() - begun_s >= 0.2
        front.add("d", PROMPT)
        assert front.answers("d")["d"]
        front.add("e", PROMPT)
        while not (outputs := front.outputs()).get("dead"):
            assert not outputs["outputs"]
        assert core.is_dead


def test_stalled_request_can_be_aborted(tmp_path: Path) -> None:
    with front_end(tmp_path, fail="1: stall 0.1s") as (front, _):
        front.add("a", PROMPT)
        front.abort("a")
        sleep(0.2)
        front.add("b", PROMPT)
        assert set(front.answers("b")) == {"b"}


def test_failures_of_http_are_refused() -> None:
    with pytest.raises(ConfigError, match="front end's"):
        FrontSettings(
            handshake="tcp://127.0.0.1:1", behind=Behind(max_model_len=10), fail="first 2: cut after 5 chunks"
        )


def test_prompt_that_can_never_run_is_an_error_of_its_own(tmp_path: Path) -> None:
    config = msgspec.structs.replace(ENGINE, num_pages=4)
    with front_end(tmp_path, config=config) as (front, _):
        front.add("a", list(range(100)))
        (output,) = front.answers("a")["a"]
        assert output["finish_reason"] == 3
        assert output["error"]["code"] == "validation_error"
        front.add("b", PROMPT[:20])
        assert len(front.answers("b")["b"]) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": {"max_tokens": "x"}},
        {"sampling_params": {"max_tokens": 4, "logprobs": "x"}},
        {"sampling_params": {"max_tokens": 4, "extra_args": "x"}},
        {"sampling_params": None, "pooling_params": [True, "x"]},
        {"mm_features": [{"identifier": "x", "mm_position": {}}]},
    ],
)
def test_request_that_cannot_be_read_fails_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    with front_end(tmp_path) as (front, _):
        front.add("a", PROMPT, **fields)
        (output,) = front.answers("a")["a"]
        assert output["finish_reason"] == 3
        assert output["error"]["code"] == "error"
        front.add("b", PROMPT)
        assert len(front.answers("b")["b"]) == 4


def test_core_ends_with_its_front_end(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, core):
        front.add("a", PROMPT, sampling_params={"max_tokens": 900, "ignore_eos": True})
        front.outputs()
        front.close()
        deadline_s = monotonic() + 10.0
        while not core.has_ended and monotonic() < deadline_s:
            sleep(0.01)
        assert core.has_ended


def test_closed_core_tells_its_front_end(tmp_path: Path) -> None:
    with front_end(tmp_path) as (front, core):
        core.stop()
        while not core.has_ended:
            sleep(0.01)
        core.close()
        assert front.outputs() == {"dead": True}


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x00", msgspec.msgpack.encode({"request_id": "a"})],
        [b"\x00"],
        [b"\x00", msgspec.msgpack.encode(["a", [1], None, {}, None, 0.0, []])],  # an adapter without a name
        [b"\x01", b"\xc1"],
        [b"\x01", msgspec.msgpack.encode([{"a": 1}])],
        [b"\x03", b"\xc1"],
        [b"\x03", msgspec.msgpack.encode([0, 1])],
        [b"\x03", msgspec.msgpack.encode(["client", 1, "is_sleeping", []])],
        [b"\x03", msgspec.msgpack.encode([0, 1, ["is_sleeping"], []])],
    ],
)
def test_message_of_another_version_ends_both_sides(
    tmp_path: Path, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with front_end(tmp_path) as (front, core):
        front._sockets["input"].send_multipart((front._identity, *frames))
        assert front.outputs() == {"dead": True}
        while not core.has_ended:
            sleep(0.01)
    assert "of vLLM 0.33.0" in caplog.text
    assert "Give the version of the front end." in caplog.text


def test_coordinator_learns_the_load_and_who_has_ended(tmp_path: Path) -> None:
    with front_end(tmp_path, has_coordinator=True) as (front, _):
        front.add("a", PROMPT, sampling_params={"max_tokens": 200, "ignore_eos": True})
        front.add("b", PROMPT)
        assert front.load()["scheduler_stats"]["num_running_reqs"] >= 1
        ended: set[str] = set()
        while "b" not in ended:
            ended.update(front.outputs().get("finished_requests") or ())
        front.abort("a")
        while "a" not in ended:
            ended.update(front.outputs().get("finished_requests") or ())
        while front.load()["scheduler_stats"]["num_running_reqs"]:
            pass


def test_no_front_end_in_time(tmp_path: Path) -> None:
    from kvarts.doors.vllm_front.opening import open_core

    with FakeFrontEnd("0.33.0") as front:
        settings = FrontSettings(handshake=front.handshake, behind=Behind(max_model_len=10), start_s=0.1)
        model = FrontModel(tiny_model(tmp_path))
        with pytest.raises(ConfigError, match=r"no front end has answered within 0\.1 s"):
            open_core(ENGINE, model, front.protocol, settings)
        with pytest.raises(ConfigError, match="is not an address"):
            open_core(ENGINE, model, front.protocol, msgspec.structs.replace(settings, handshake="nowhere"))


# Versions and models ----------------------------------------------------------------------------------------


def test_unknown_version_is_refused_by_name_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.41\.2 are not known; those of 0\.32, 0\.33 are"):
        protocol_of("0.41.2")
    assert protocol_of("0.41.2", as_version="0.33").has_error
    assert not protocol_of("0.32.1+cpu").has_error


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([3])])
def test_bytes_that_are_no_request(payload: bytes) -> None:
    with pytest.raises(InputError, match="is no request of vLLM"):
        protocol_of("0.33.0").request(payload)


def test_longer_arrays_of_later_versions_are_read() -> None:
    protocol = protocol_of("0.33.0")
    values: list[Any] = [
        "a",
        [1, 2],
        None,
        {},
        None,
        0.0,
        *[None] * 5,
        0,
        0,
        0,
        None,
        False,
        None,
        None,
        None,
        False,
        None,
        None,
        9,
    ]
    assert protocol.request(msgspec.msgpack.encode(values)).prompt_token_ids == [1, 2]


def test_media_make_prompts_differ() -> None:
    def ids(name: str) -> list[int]:
        return list(with_media([1, 9, 9, 9, 2], [MediaFeature(name, {"offset": 1, "length": 3})]))

    assert ids("x")[0] == 1
    assert ids("x")[-1] == 2
    assert ids("x") == ids("x") != ids("y")
    assert len(set(ids("x"))) == 5


def test_call_in_xml_is_cut_where_its_answer_has_no_room(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    model = FrontModel(tiny_model(tmp_path))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tag = {"format": {"type": "qwen_xml_parameter", "json_schema": schema}}
    sampling = {"structured_outputs": {"structural_tag": tag}}
    whole = model.written(sampling, 0, 512)
    assert len(whole) > 3
    assert model.written(sampling, 0, 3) == whole[:3]


def test_model_directory_that_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config\.json: does not exist"):
        FrontModel(tmp_path)
    (tiny_model(tmp_path) / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ConfigError, match=r"0 of .* common English words"):
        FrontModel(tmp_path)
    for text in ("[", '{"model":' * 5000):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(InputError, match="is no JSON object"):
            FrontModel(tmp_path)


@pytest.mark.long
def test_front_end_that_listens_long_before_it_speaks_has_not_ended() -> None:
    """vLLM opens its ports before it starts several API servers; ZeroMQ would give up after 30 s."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        link = Link(address, 0)
        link.connect(Addresses([address], []), b"")
        receiving = Thread(target=lambda: list(link.received()))
        receiving.start()
        connections = [listener.accept()[0], listener.accept()[0]]
        receiving.join(32.0)
        assert receiving.is_alive()
        for connection in connections:
            connection.close()
        receiving.join(10.0)
        assert not receiving.is_alive()
        link.close()
