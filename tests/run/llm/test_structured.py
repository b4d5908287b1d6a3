"""Text that keeps to a grammar: whatever the model would say, with speculation, sampling and log-probabilities."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("llguidance", reason="grammars need llguidance")

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams, StructuredOutputs
from kvarts.run.torch.llm import LLM

from builders.guessing import untimed

CONFIG = EngineConfig(num_pages=512, page_size=4, max_num_batched_tokens=64, max_num_seqs=8)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: "a" (NUMBER ",")+ "z"\nNUMBER: /[0-9]{2}/'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and len(value["name"]) <= 5 and 0 <= value["age"] <= 99


CHOICES = ("yes", "no", "per\u00f2 \U0001f600")
WANTED: list[tuple[StructuredOutputs, Callable[[str], Any]]] = [
    (StructuredOutputs(json=PERSON), is_person),
    (StructuredOutputs(json=json.dumps(PERSON)), is_person),
    (StructuredOutputs(regex=r"[a-c]{3,8}-\d{2}"), lambda text: re.fullmatch(r"[a-c]{3,8}-\d{2}", text)),
    (StructuredOutputs(choice=CHOICES), lambda text: text in CHOICES),
    (StructuredOutputs(grammar=LARK), lambda text: re.fullmatch(r"a(\d\d,)+z", text)),
    (StructuredOutputs(grammar='root ::= "x" [0-4] "y"'), lambda text: re.fullmatch("x[0-4]y", text)),
]  # fmt: skip
PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> LLM:
    return LLM(tiny("qwen3"), config=CONFIG)


def is_kept(text: str, finish_reason: str, keeps: Callable[[str], Any]) -> bool:
    """A random model may go on for ever where its grammar allows that; what has ended is whole."""
    return bool(keeps(text)) if finish_reason == "stop" else True


@pytest.mark.parametrize(("wanted", "keeps"), WANTED)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_text_keeps_to_its_grammar(
    llm: LLM, wanted: StructuredOutputs, keeps: Callable[[str], Any], temperature: float
) -> None:
    params = [
        SamplingParams(max_tokens=80, temperature=temperature, seed=seed, structured_outputs=wanted, logprobs=True)
        for seed in range(6)
    ]
    told = llm.generate([PROMPT] * 6, params)
    assert all(is_kept(one.text, one.finish_reason, keeps) for one in told), [one.text for one in told]
    assert temperature == 0.0 or any(one.finish_reason == "stop" for one in told)
    assert all(one.logprobs is not None and len(one.logprobs) == len(one.tokens) for one in told)


def test_guesses_and_others_in_the_batch_change_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    untimed(monkeypatch)
    guessing = LLM(llm._model, llm.tokenizer, CONFIG, speculative_config={"prompt_lookup_min": 1}, audit=True)
    params = [SamplingParams(max_tokens=60, structured_outputs=wanted) for wanted, _ in WANTED]
    plain = SamplingParams(max_tokens=60, ignore_eos=True)
    alone = [llm.generate([PROMPT], one)[0] for one in (*params, plain)]
    together = guessing.generate([PROMPT] * (len(params) + 1), [*params, plain])
    assert [(one.tokens, one.finish_reason) for one in together] == [(one.tokens, one.finish_reason) for one in alone]
    assert guessing.drafts is not None and guessing.drafts.num_accepted_tokens > 0


def test_an_end_of_the_grammar_is_an_end_whatever_else_is_asked(llm: LLM) -> None:
    wanted = StructuredOutputs(choice=("yes",))
    for params in (
        SamplingParams(max_tokens=30, min_tokens=20, structured_outputs=wanted),
        SamplingParams(max_tokens=30, ignore_eos=True, structured_outputs=wanted),
        SamplingParams(max_tokens=30, temperature=2.0, top_k=3, min_p=0.5, structured_outputs=wanted),
    ):
        (told,) = llm.generate([PROMPT], params)
        assert (told.text, told.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "("}, {"grammar": "start: missing"}, {"json": '{"type": "objekt"}'}, {"json": "{"},
        {"json": {"$ref": "http://example.com/a"}}, {"grammar": "start: start"}, {"json": {"$ref": "#"}},
        {"regex": "(a{1000}){1000}"}, {"regex": "(a?){5000}a{5000}"},
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_before_it_runs(llm: LLM, wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs: cannot be (compiled|kept to)"):
        llm.generate([PROMPT], SamplingParams(structured_outputs=StructuredOutputs(**wanted)))
    assert llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))[0].finish_reason == "length"


def test_a_grammar_that_is_too_complex_is_refused_soon(llm: LLM) -> None:
    """Before it runs, because all other requests would wait for its first token, which took four seconds."""
    began = time.process_time()
    with pytest.raises(ConfigError, match="too many"):
        llm.check_params(SamplingParams(structured_outputs=StructuredOutputs(regex="(a{1000}){999}")))
    assert time.process_time() - began < 2.0


def test_a_grammar_that_is_compiled_does_not_keep_steps_of_others_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = llm._grammars
    known, slow = StructuredOutputs(regex="[0-9]{4}"), StructuredOutputs(regex="[0-9]{5}")
    grammars.compile(known)
    compile_one, begun, goes_on = grammars._compile, threading.Event(), threading.Event()

    def compile_slowly(wanted: StructuredOutputs) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return compile_one(wanted)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    compiling = threading.Thread(target=grammars.compile, args=(slow,), daemon=True)
    compiling.start()
    assert begun.wait(20)
    found = threading.Thread(target=grammars.matcher, args=(known,), daemon=True)
    found.start()
    found.join(10)
    is_waiting = found.is_alive()
    goes_on.set()
    compiling.join(20)
    assert not is_waiting


@pytest.mark.parametrize("wanted", [{}, {"json": {}, "regex": "a"}, {"choice": ()}, {"regex": 3}, {"json": [1]}])
def test_one_thing_is_asked_for(wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="structured_outputs"):
        StructuredOutputs(**wanted)
