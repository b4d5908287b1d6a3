"""One engine under measurement, as a process of its own: see decode_speed.py, which starts it.

    PYTHON benchmarks/decode_workers.py ENGINE DIR

runs in the environment of that engine, with the model in DIR. Reads a Work a line from standard input, and writes what
it measured as a line to standard output, until the input ends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any, NamedTuple, Self

NUM_THREADS = int(os.environ.get("KVARTS_THREADS", "2"))
DEVICE = os.environ.get("KVARTS_DEVICE", "cpu")
"""Of kvarts, of `generate` and of continuous batching."""
now_s = process_time if os.environ.get("KVARTS_CPU_TIME") else perf_counter
"""The clock of kvarts' own workers: what passed, or, on a machine with other work, processor time."""


class Work(NamedTuple):
    """Sequences that decode at once, tokens of each prompt, and the steps that are measured.

    Without steps it is the prompts that are measured, until all have their first token.
    """

    num_sequences: int
    length: int
    steps: int

    @property
    def prompts(self) -> list[list[int]]:
        """The same in all engines."""
        random = Random(self.length)
        return [[random.randrange(150_000) for _ in range(self.length)] for _ in range(self.num_sequences)]


CHOICES = {"layers": "KVARTS_LAYERS", "attention": "KVARTS_ATTENTION"}
Measured = dict[str, Any]
"""`rate`: tokens a second while all sequences decode, or of prompts. `cpu_s`: processor seconds per token, if they are
known. `first`: the first token of each. `outside`: the share of a step that is not the model: scheduler, tables,
commit, and the choice of tokens."""
Engine = Callable[[Work], Measured]


class Moment(NamedTuple):
    """The time that has passed, and the processor time of this process and its descendants."""

    passed_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Self:
        """Processor time of a descendant has the resolution of Linux's clock ticks, 10 ms."""
        ticks = sum(_cpu_ticks(pid) for pid in _descendants(os.getpid()))
        return cls(perf_counter(), process_time() + ticks / os.sysconf("SC_CLK_TCK"))

    def measured(self, end: Moment, num_tokens: int) -> Measured:
        """`rate` and `cpu_s` of `num_tokens` that were computed from this moment to `end`."""
        return {
            "rate": num_tokens / (end.passed_s - self.passed_s),
            "cpu_s": (end.cpu_s - self.cpu_s) / num_tokens,
        }


def _descendants(pid: int) -> list[int]:
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:  # a thread that has ended
            continue
    return children + [one for child in children for one in _descendants(child)]


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def submitted(model: Any, work: Work, **settings: Any) -> tuple[Any, list[Any]]:
    """An engine of kvarts with the prompts of all sequences, and what they will say."""
    from kvarts.core.config import EngineConfig
    from kvarts.core.sampling import SamplingParams
    from kvarts.run.torch.llm import LLM

    pages = work.num_sequences * -(-(work.length + work.steps + 8) // 16)
    # On a GPU all prompts in one step: CUDA graphs of fewer sequences are not captured while it is timed.
    budget = 4096 if DEVICE == "cpu" else max(4096, work.num_sequences * (work.length + 1))
    config = EngineConfig(num_pages=pages, page_size=16, max_num_batched_tokens=budget, max_num_seqs=work.num_sequences)
    engine = LLM(model, None, config, **settings)
    params = SamplingParams(max_tokens=work.steps + 4, ignore_eos=True)
    return engine, [engine.generation(engine.submit(prompt, params)) for prompt in work.prompts]


def decoding(model: Any, work: Work, **settings: Any) -> tuple[Any, list[Any]]:
    """An engine of kvarts in which all sequences decode, for `work.steps` more steps, and what they said so far."""
    engine, generations = submitted(model, work, **settings)
    while any(not generation.tokens for generation in generations):
        engine.step()
    engine.step()
    return engine, generations


def open_kvarts(directory: Path) -> Engine:
    import torch

    from kvarts.run.torch.executor import TorchExecutor
    from kvarts.run.torch.loading import load_model
    from kvarts.run.torch.numba_backend import NumbaBackend

    torch.set_num_threads(NUM_THREADS)
    quantization = os.environ.get("KVARTS_QUANTIZATION")
    settings_of_model: dict[str, Any] = {"quantization": quantization} if quantization else {}
    model = load_model(directory, device=DEVICE, **settings_of_model)
    # A version of kvarts from before there was a choice is measured as it is.
    settings: dict[str, Any] = {name: os.environ[key] for name, key in CHOICES.items() if key in os.environ}
    if "KVARTS_EAGER" in os.environ:
        settings["enforce_eager"] = True
    inside = 0.0
    logits, order = TorchExecutor._logits, NumbaBackend._order_decodes

    def timed_logits(*args: Any) -> Any:
        """The projection to logits runs when they are asked for: it is part of the model."""
        nonlocal inside
        start = now_s()
        rest = iter(logits(*args))
        while True:
            out = next(rest, None)
            inside += now_s() - start
            if out is None:
                return
            yield out
            start = now_s()

    def timed_order(*args: Any) -> Any:
        """It is done when the first layer asks, so the model's time has it; it belongs to the tables."""
        nonlocal inside
        start = now_s()
        decodes = order(*args)
        inside -= now_s() - start
        return decodes

    TorchExecutor._logits = timed_logits  # type: ignore[assignment, method-assign]
    NumbaBackend._order_decodes = timed_order  # type: ignore[assignment, method-assign]

    def measure(work: Work) -> Measured:
        nonlocal inside
        if not work.steps:
            return until_first_token(model, work, settings)
        engine, generations = decoding(model, work, **settings)
        first = [generation.tokens[0] for generation in generations]
        inside, taken_s = 0.0, []
        begun = Moment.now()
        for _ in range(work.steps):
            start = now_s()
            engine.step()
            taken_s.append(now_s() - start)
        measured = begun.measured(Moment.now(), work.num_sequences * work.steps)
        measured["rate"] = work.num_sequences * work.steps / sum(taken_s)
        at_median = work.num_sequences / statistics.median(taken_s)
        measured |= {"median": at_median, "first": first}
        return measured if DEVICE != "cpu" else {**measured, "outside": 1 - inside / sum(taken_s)}

    return measure


def until_first_token(model: Any, work: Work, settings: dict[str, Any]) -> Measured:
    """Prompt tokens a second, until all have their first token."""
    engine, generations = submitted(model, work, **settings)
    begun, start = Moment.now(), now_s()
    while any(not generation.tokens for generation in generations):
        engine.step()
    taken_s = now_s() - start
    measured = begun.measured(Moment.now(), work.num_sequences * work.length)
    first = [generation.tokens[0] for generation in generations]
    return measured | {"rate": work.num_sequences * work.length / taken_s, "first": first}


def open_generate(directory: Path) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(NUM_THREADS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval().to(DEVICE)

    def measure(work: Work) -> Measured:
        ids = torch.tensor(work.prompts, device=DEVICE)
        made = [Moment.now()]

        def note(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            """Asked after each token whether to stop."""
            made.append(Moment.now())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=work.steps + 2,
                max_new_tokens=work.steps + 2,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note],
            )
        first: list[int] = out[:, work.length].tolist()
        if not work.steps:
            return made[0].measured(made[1], work.num_sequences * work.length) | {"first": first}
        return made[-1 - work.steps].measured(made[-1], work.num_sequences * work.steps) | {"first": first}

    return measure


def open_continuous(directory: Path) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(NUM_THREADS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", attn_implementation="sdpa").eval().to(DEVICE)

    def measure(work: Work) -> Measured:
        most = work.length + work.steps + 2
        out = model.generate_batch(
            work.prompts,
            generation_config=GenerationConfig(max_new_tokens=work.steps + 2, do_sample=False, eos_token_id=-1),
            # As many pages as it needs: with those it would take by itself it is slower.
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16,
                num_blocks=work.num_sequences * (-(-most // 16) + 1) + 8,
                max_batch_tokens=4096,
                allow_block_sharing=False,
            ),
            warmup=False,
            record_timestamps=True,
        )
        answers = list(out.values())
        times = [answer.timestamps for answer in answers]
        # From where all have begun; it says when each token was made.
        taken = min(one[-1] for one in times) - max(one[1] for one in times)
        num_steps = len(times[0]) - 2
        assert num_steps == work.steps
        return {
            "rate": work.num_sequences * num_steps / taken,
            "first": [answer.generated_tokens[0] for answer in answers],
        }

    return measure


def open_llama(directory: Path) -> Engine:
    import llama_cpp as ll

    from llama_model import write_gguf

    path = directory / "model-bf16.gguf"
    if not path.exists():
        write_gguf(directory, path)
    model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
    assert model, "llama.cpp cannot load what was written for it"

    def decode(context: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        """Of (token, position, sequence, whether it is sampled)."""
        batch = ll.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, is_sampled) in enumerate(entries):
            batch.token[place] = token
            batch.pos[place] = position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence
            batch.logits[place] = is_sampled
        assert ll.llama_decode(context, batch) == 0
        ll.llama_batch_free(batch)

    def measure(work: Work) -> Measured:
        params = ll.llama_context_default_params()
        params.n_ctx = work.num_sequences * (work.length + work.steps + 16)
        params.n_seq_max = work.num_sequences
        params.n_threads = params.n_threads_batch = NUM_THREADS
        context = ll.llama_init_from_model(model, params)
        sampler = ll.llama_sampler_init_greedy()
        tokens = []
        start = Moment.now()
        for sequence, prompt in enumerate(work.prompts):
            entries = [(token, place, sequence, place == len(prompt) - 1) for place, token in enumerate(prompt)]
            for first_entry in range(0, len(entries), params.n_batch):
                decode(context, entries[first_entry : first_entry + params.n_batch])
            tokens.append(ll.llama_sampler_sample(sampler, context, -1))
        first, position = list(tokens), work.length
        if not work.steps:
            measured = start.measured(Moment.now(), work.num_sequences * work.length)
            ll.llama_sampler_free(sampler)
            ll.llama_free(context)
            return measured | {"first": first}

        def step() -> None:
            nonlocal position, tokens
            decode(context, [(token, position, sequence, True) for sequence, token in enumerate(tokens)])
            tokens = [ll.llama_sampler_sample(sampler, context, place) for place in range(work.num_sequences)]
            position += 1

        step()
        start = Moment.now()
        for _ in range(work.steps):
            step()
        measured = start.measured(Moment.now(), work.num_sequences * work.steps)
        ll.llama_sampler_free(sampler)
        ll.llama_free(context)
        return measured | {"first": first}

    return measure


def open_vllm(directory: Path) -> Engine:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{NUM_THREADS - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        enforce_eager=os.environ.get("KVARTS_VLLM_EAGER") == "1",
    )

    core = engine.llm_engine
    num_asked = 0

    def measure(work: Work) -> Measured:
        nonlocal num_asked
        params = SamplingParams(temperature=0, max_tokens=work.steps + 4, ignore_eos=True, detokenize=False)
        names = [f"{num_asked + place}" for place in range(work.num_sequences)]
        num_asked += work.num_sequences
        tokens: dict[str, list[int]] = {}

        def until(each: int) -> None:
            """Step until all have as many tokens."""
            while len(tokens) < len(names) or min(map(len, tokens.values())) < each:
                for output in core.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)

        start = Moment.now()
        for name, prompt in zip(names, work.prompts, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, params)
        until(1)
        measured = start.measured(Moment.now(), work.num_sequences * work.length)
        if work.steps:
            until(2)
            before, start = sum(map(len, tokens.values())), Moment.now()
            until(2 + work.steps)
            measured = start.measured(Moment.now(), sum(map(len, tokens.values())) - before)
        while core.has_unfinished_requests():
            for output in core.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        by_place = {name.partition("-")[0]: said for name, said in tokens.items()}
        return measured | {"first": [by_place[name][0] for name in names]}

    return measure


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "kvarts": open_kvarts,
    "generate": open_generate,
    "continuous": open_continuous,
    "llama": open_llama,
    "vllm": open_vllm,
}


def main() -> None:
    # What a library prints goes where narration goes.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measure = ENGINES[sys.argv[1]](Path(sys.argv[2]))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(Work(**json.loads(line)))), file=out, flush=True)


if __name__ == "__main__":
    main()
