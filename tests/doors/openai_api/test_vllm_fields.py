"""Fields of vLLM's requests: each is done, refused or ignored, as docs/reference.md says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.doors.openai.bodies import NOT_DONE, ChatBody, CompletionBody
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call
from builders.vllm_python import vllm_environment, vllm_python

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"

OF_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
    ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
    logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt_logprobs
    repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_token_ids
    return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side
    use_beam_search user vllm_xargs watermarking
"""
OF = {
    CHAT: f"""{OF_BOTH}
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
    max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort
    return_prompt_text tool_choice tools top_logprobs
    """.split(),
    COMPLETIONS: f"""{OF_BOTH}
    prompt prompt_embeds suffix
    """.split(),
}
"""The fields of vLLM 0.32.0's ChatCompletionRequest and CompletionRequest."""

BODIES: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "seed": 1},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 3, "seed": 1},
}
ASKED: dict[str, Any] = {
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5],
    "bad_words": ["sea"],
    "truncate_prompt_tokens": 4,
    "suffix": "sea",
}
"""Values of fields with a type; of the others True will do."""


def documented() -> dict[str, str]:
    """What the reference says of each field: done, refused or ignored."""
    section = REFERENCE.read_text().partition("### Fields of vLLM's requests")[2].partition("\n#")[0]
    told: dict[str, str] = {}
    for fields, what in re.findall(r"^\| (`.*?) \| (done|refused|ignored)\b", section, re.MULTILINE):
        for field in re.findall(r"`(\w+)`", fields):
            assert field not in told, f"{field} is told twice"
            told[field] = what
    return told


def those(what: str) -> list[tuple[str, str]]:
    """The fields of which that is said, with the paths of which they are."""
    told = documented()
    return [(path, field) for path in OF for field in OF[path] if told.get(field) == what]


def test_the_reference_says_of_each_field_what_is_done_with_it() -> None:
    told = documented()
    assert sorted(told) == sorted({*OF[CHAT], *OF[COMPLETIONS]})
    for path, body in ((CHAT, ChatBody), (COMPLETIONS, CompletionBody)):
        read = set(body.__struct_fields__)
        assert {field for at, field in those("done") if at == path} <= read - set(NOT_DONE)
        assert {field for at, field in those("refused") if at == path} <= read & set(NOT_DONE)
        assert {field for at, field in those("ignored") if at == path} & read <= {"user"}


@pytest.mark.parametrize(("path", "field"), [*those("refused"), (CHAT, "echo")])
def test_what_is_not_done_is_refused_by_its_name(server: RunningServer, path: str, field: str) -> None:
    empty: list[Any] = [None, False, [], {}]
    for nothing in empty:
        try:
            body = {**BODIES[path], field: nothing}
            msgspec.convert(body, ChatBody if path == CHAT else CompletionBody)
        except msgspec.ValidationError:
            continue  # of another type
        assert call(server.url, path, body).status == 200
    reply = call(server.url, path, {**BODIES[path], field: ASKED.get(field, True)})
    assert reply.status == 400 and reply.json["error"]["param"] == field
    assert field in reply.json["error"]["message"]


@pytest.mark.parametrize("path", OF)
def test_what_is_ignored_changes_nothing(server: RunningServer, path: str) -> None:
    def told(**more: Any) -> Any:
        reply = call(server.url, path, {**BODIES[path], **more})
        assert reply.status == 200, reply.payload
        return reply.json["choices"]

    assert told(**{field: "x" for at, field in those("ignored") if at == path}) == told()


def test_these_are_the_fields_that_vllm_publishes() -> None:
    program = """if True:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    print(*ChatCompletionRequest.model_fields)
    print(*CompletionRequest.model_fields)
    """
    done = subprocess.run(
        [vllm_python(), "-c", program], env=vllm_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    chat, completions = done.stdout.strip().splitlines()[-2:]
    assert sorted(chat.split()) == sorted(OF[CHAT]) and sorted(completions.split()) == sorted(OF[COMPLETIONS])
