"""Runs a load generator that others have written against `kvarts mock`, unchanged, and says what became of it.

    python benchmarks/serve_clients.py aiperf-chat --bin /venvs/aiperf/bin --work /tmp/clients
    python benchmarks/serve_clients.py aiperf-mooncake --bin /venvs/aiperf/bin --work /tmp/clients
    python benchmarks/serve_clients.py guidellm --bin /venvs/guidellm/bin --work /tmp/clients
    python benchmarks/serve_clients.py evalscope-perf-chat --bin /venvs/evalscope/bin --work /tmp/clients
    python benchmarks/serve_clients.py inference-perf-chat --bin /venvs/inference-perf/bin --work /tmp/clients
    python benchmarks/serve_clients.py vllm-bench --bin /venvs/vllm/bin --work /tmp/clients
    python benchmarks/serve_clients.py openai-3 --bin /venvs/openai/bin --work /tmp/clients --vllm /venvs/vllm/bin/vllm

`--bin`: the folder of the environment in which the client is installed; it needs nothing of kvarts, and kvarts nothing
of it. `--vllm` puts the mock behind vLLM's own front end, of this script. A tokenizer is trained once in `--work`,
without a download (needs `tokenizers`, here), in the layout of a hub's cache. Prints JSON: the client's exit code, how
long it took, the last lines that it wrote, what the server counted, and what `kvarts.load_trace` reads of the results
that the client exported: requests, tokens of prompts and of answers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from front_end import Started
from http_tap import Tap

REVISION = "0" * 40
NAME = "local/tok2"
COUNTERS = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "kvarts:requests_aborted_total",
    "kvarts:requests_refused_total",
)


def tokenizer(work: Path) -> Path:
    """Train a byte-level tokenizer on the bundled text; return its folder, which lies in a hub's cache."""
    folder = work / "hf" / "hub" / "models--local--tok2" / "snapshots" / REVISION
    if (folder / "tokenizer.json").exists():
        return folder
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, special_tokens=["<end>"])
    source = [str(path) for path in Path(str(files("kvarts"))).rglob("*.py")]
    trained.train(source, trainer)
    trained.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
             "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "vocab_size": trained.get_vocab_size(), "max_position_embeddings": 16_384, "torch_dtype": "bfloat16",
             "eos_token_id": trained.token_to_id("<end>")}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(REVISION)
    return folder


def mooncake(work: Path, rows: int) -> Path:
    """Write the first rows of the bundled trace with short prompts, and times close together."""
    source = (files("kvarts") / "data" / "mooncake-conversation-1000.jsonl").read_text().splitlines()[:rows]
    path = work / "mooncake.jsonl"
    with path.open("w") as file:
        for line in source:
            row = json.loads(line)
            row |= {"timestamp": row["timestamp"] // 10, "input_length": min(row["input_length"], 1024)}
            row |= {"hash_ids": row["hash_ids"][: -(-row["input_length"] // 512)]}
            row |= {"output_length": min(row["output_length"], 50)}
            file.write(json.dumps(row) + "\n")
    return path


def questions(work: Path, rows: int) -> Path:
    """Write questions with answers for evalscope; return their folder."""
    folder = work / "questions"
    folder.mkdir(exist_ok=True)
    rows_of = ({"system": "Be brief.", "query": f"What is {n} + 1?", "response": str(n + 1)} for n in range(rows))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    return folder


def inference_perf(kind: str, url: str, folder: Path, work: Path, requests: int) -> Path:
    """Write a configuration of inference-perf: 8 requests a second, with prefixes that groups share."""
    config = {
        "load": {"type": "constant", "stages": [{"rate": 8, "duration": max(1, requests // 8)}], "num_workers": 1},
        "api": {"type": kind, "streaming": True},
        "server": {"type": "vllm", "model_name": "dummy", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(folder)},
        "data": {
            "type": "shared_prefix",
            "shared_prefix": {
                "num_unique_system_prompts": 4,
                "num_users_per_system_prompt": 4,
                "system_prompt_len": 100,
                "question_len": 20,
                "output_len": 20,
            },
        },
        "report": {"request_lifecycle": {"per_request": True, "per_request_fields": {"response_chunks": False}}},
        "storage": {"local_storage": {"path": str(work / f"out-inference-perf-{kind}")}},
    }
    path = work / f"inference-perf-{kind}.yaml"
    path.write_text(json.dumps(config))
    return path


LITELLM = """
import json, os, secrets, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path
url, log, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
work, key, port = Path(log).parent, "sk-" + secrets.token_hex(24), 4999
(work / "litellm_log.py").write_text('''
import json, os
from litellm.integrations.custom_logger import CustomLogger
class Log(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        with open(os.environ["LOG"], "a") as file:
            file.write(json.dumps(kwargs["standard_logging_object"], default=str) + chr(10))
log = Log()
''')
model = {"model": "openai/dummy", "api_base": url + "/v1", "api_key": "none"}
settings = {"callbacks": "litellm_log.log", "cache": True, "cache_params": {"type": "local"}}
config = {"model_list": [{"model_name": "dummy", "litellm_params": model}], "litellm_settings": settings}
(work / "litellm.yaml").write_text(json.dumps(config))
words = ["--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
proxy = subprocess.Popen([str(Path(sys.executable).parent / "litellm"), *words], cwd=work,
                         env={**os.environ, "LOG": log, "LITELLM_MASTER_KEY": key})
def post(path, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + key}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
try:
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)
            break
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    for place in range(count):
        ask = [{"role": "user", "content": f"What is {place // 2} + 1?"}]
        post("/v1/chat/completions", {"model": "dummy", "messages": ask, "max_tokens": 8, "ignore_eos": True})
        time.sleep(0.1)
    if "embeddings" in sys.argv:
        post("/v1/embeddings", {"model": "dummy", "input": "hello"})
    time.sleep(2)
finally:
    proxy.terminate()
    proxy.wait(30)
"""
"""Sends each request twice through LiteLLM's proxy, whose cache answers the second, and perhaps an embedding."""

SDK = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
print([model.id for model in client.models.list()])
hello = [{"role": "user", "content": "Hello!"}]
for _ in range(int(sys.argv[2])):
    whole = client.chat.completions.create(model="dummy", messages=hello, max_tokens=8)
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="dummy", messages=hello, max_tokens=8, stream=True, stream_options=options
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    client.completions.create(model="dummy", prompt="Hello!", max_tokens=8, extra_body={"ignore_eos": True})
    client.responses.create(model="dummy", input="Hello!", max_output_tokens=8)
print("fine", text)
"""


def command(what: str, url: str, folder: Path, work: Path, requests: int, *, has_embeddings: bool) -> list[str]:
    """The command line of a client, without its folder."""
    out = str(work / f"out-{what}")
    if what.startswith("aiperf"):
        endpoint = "chat" if what == "aiperf-chat" else "completions"
        common = f"aiperf profile --model dummy --url {url} --endpoint-type {endpoint} --streaming --tokenizer {NAME}"
        load = (
            f"--input-file {mooncake(work, requests)} --custom-dataset-type mooncake_trace "
            "--fixed-schedule --fixed-schedule-auto-offset"
            if what == "aiperf-mooncake"
            else f"--concurrency 8 --request-count {requests} --isl 100 --osl 20 --extra-inputs ignore_eos:true"
        )
        return f"{common} {load} --artifact-dir {out} --ui none".split()
    if what.startswith("openai"):
        return ["python", "-c", SDK, url, str(max(1, requests // 4))]
    if what == "litellm":
        Path(f"{out}.jsonl").unlink(missing_ok=True)
        return ["python", "-c", LITELLM, url, f"{out}.jsonl", str(requests), *(["embeddings"] * has_embeddings)]
    if what == "guidellm":
        return (
            f"guidellm run --backend kind=openai_http,target={url},model=dummy --profile kind=concurrent,streams=8 "
            f"--constraint kind=max_requests,count={requests} --tokenizer kind=hf_auto,model={folder} "
            "--data kind=synthetic_text,prompt_tokens=100,output_tokens=20 "
            f"--output kind=json,path={out}.json --disable-progress"
        ).split()
    if what.startswith("evalscope-perf"):
        path = "chat/completions" if what == "evalscope-perf-chat" else "completions"
        return (
            f"evalscope perf --url {url}/v1/{path} --api openai --model dummy --parallel 8 --number {requests} "
            f"--dataset random --tokenizer-path {folder} --min-prompt-length 100 --max-prompt-length 100 "
            f"--prefix-length 0 --min-tokens 20 --max-tokens 20 --stream --outputs-dir {out}"
        ).split()
    if what == "evalscope-eval":
        told = {"general_qa": {"local_path": str(questions(work, requests)), "subset_list": ["questions"]}}
        arguments = json.dumps(told, separators=(",", ":"))
        return (
            f"evalscope eval --model dummy --api-url {url}/v1 --api-key none --eval-type openai_api "
            f"--datasets general_qa --dataset-args {arguments} --eval-batch-size 8 --work-dir {out}"
        ).split()
    if what.startswith("inference-perf"):
        kind = what.removeprefix("inference-perf-")
        return ["inference-perf", "--config_file", str(inference_perf(kind, url, folder, work, requests))]
    chat = "--backend openai-chat --endpoint /v1/chat/completions" if what == "vllm-bench-chat" else "--backend openai"
    return (
        f"python -m vllm.entrypoints.cli.main bench serve {chat} --base-url {url} --model dummy --tokenizer {folder} "
        f"--dataset-name random --random-input-len 100 --random-output-len 20 --num-prompts {requests} "
        f"--max-concurrency 8 --ignore-eos --save-result --save-detailed --result-filename {out}.json"
    ).split()


def exported(what: str, work: Path) -> dict[str, Any] | None:
    """What kvarts reads of the newest file that a client exported; None for a client without one."""
    pattern = {
        "aiperf": f"out-{what}/**/profile_export.jsonl",
        "guidellm": "out-guidellm.json",
        "vllm": f"out-{what}.json",
        "inference": f"out-{what}/**/per_request_lifecycle_metrics.json",
        "litellm": "out-litellm.jsonl",
    }.get(what.split("-", maxsplit=1)[0])
    paths = sorted(work.glob(pattern), key=lambda path: path.stat().st_mtime) if pattern else []
    if not paths:
        return None
    from kvarts import load_trace

    trace = load_trace(paths[-1])
    return {
        "file": str(paths[-1].relative_to(work)),
        "requests": len(list(trace)),
        "prompt_tokens": sum(request.num_prompt_tokens for request in trace),
        "output_tokens": sum(request.num_output_tokens for request in trace),
        "left_out": trace.left_out,
        "said": trace.said(),
    }


def counters(url: str) -> dict[str, float]:
    """What the server counted, over all labels."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    return {
        name: sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))
        for name in COUNTERS
    }


@contextmanager
def served(vllm: str | None, folder: Path) -> Iterator[str]:
    """Yield the address of a mock, behind the front end of the script `vllm` if there is one."""
    settings = ["--served-model-name", "dummy", "--cost", "linear:step_ms=5"]
    if vllm is not None:
        arguments = ["--max-model-len", "16384", "--enable-prompt-tokens-details"]
        with (
            tempfile.TemporaryDirectory() as own,
            Started(vllm, str(folder), Path(own), [*settings, "--pages", "8192"], arguments) as front,
        ):
            front.wait_until_up()
            yield front.url
        return
    words = [sys.executable, "-m", "kvarts", "mock", "--port", "0", *settings]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = re.search(r"http://[\d.:]+\d", server.stderr.readline())
        assert found is not None
        yield found[0]
    finally:
        server.terminate()
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [
        "aiperf-chat",
        "aiperf-completions",
        "aiperf-mooncake",
        "guidellm",
        "vllm-bench",
        "vllm-bench-chat",
        "evalscope-perf-chat",
        "evalscope-perf-completions",
        "evalscope-eval",
        "inference-perf-chat",
        "inference-perf-completion",
        "litellm",
        "openai-2",
        "openai-3",
    ]
    parser.add_argument("client", choices=names)
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--save", type=Path, help="keep the first request of each kind, byte by byte, in this folder")
    parser.add_argument("--vllm", help="a script of vLLM, whose front end is put before the mock")
    parser.add_argument("--timeout", type=float, default=300.0)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    folder = tokenizer(arguments.work)
    with served(arguments.vllm, folder) as url:
        front = url
        if arguments.save is not None:
            arguments.save.mkdir(parents=True, exist_ok=True)
            front = Tap(url, arguments.save, arguments.client).url
        words = command(arguments.client, front, folder, arguments.work, arguments.requests,
                        has_embeddings=arguments.vllm is None)  # fmt: skip
        environment = {**os.environ, "HF_HOME": str(arguments.work / "hf"), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        began = time.monotonic()
        done = subprocess.run(
            [str(arguments.bin / words[0]), *words[1:]],
            cwd=arguments.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=arguments.timeout,
            check=False,
        )
        result: dict[str, Any] = {
            "command": " ".join(words),
            "exit_code": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "counted": counters(url),
            "exported": exported(arguments.client, arguments.work),
            "said": done.stdout.splitlines()[-40:],
        }
        print(json.dumps(result, indent=1))
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
