"""What AIPerf, GuideLLM and Dynamo read in the rows that `kvarts trace convert --to TOOL` writes for them.

    python benchmarks/trace_readers.py TRACE --work /tmp/readers --to aiperf=/venvs/aiperf/bin


TOOL=BIN: aiperf, guidellm or dynamo, and the folder of its environment. AIPerf and GuideLLM send the rows to a server
here, with a tokenizer of bytes: prompts are counted, and the prefixes that they share. Dynamo replays them in its
mocker, next to `kvarts replay --profile mocker` of TRACE itself. TRACE should be short, as it is sent at its own times,
and each of its requests has another output length, by which it is known again. Prints JSON: how many requests have the
length, the time (within 50 ms) and the shared prefix of the trace: tokens in common with the best earlier prompt, which
may differ by up to 15 by chance.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from kvarts import load_trace
from kvarts.sim.traffic.trace import spell
from many_clocks import NAME

DYNAMO = """
import json, sys, dynamo._core as dynamo
trace, block, out = sys.argv[1:]
engine = {"backend": "vllm", "num_gpu_blocks": 4000, "block_size": 16, "max_num_seqs": 64}
engine["max_num_batched_tokens"] = 8192
dynamo.run_mocker_trace_replay([trace], extra_engine_args={"engine": engine}, num_workers=1,
                               trace_block_size=int(block), report_jsonl_path=out)
"""


class Recorder(BaseHTTPRequestHandler):
    """Answers every request at once, and keeps its time, prompt and length."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[float, bytes, int]]] = []

    def log_message(self, *args):
        """Print nothing."""

    def do_GET(self):
        """Name the model."""
        self._send(b"" if "metrics" in self.path else b'{"object":"list","data":[{"id":"dummy"}]}', "application/json")

    def do_POST(self):
        """Stream one token."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        most = asked.get("max_tokens") or asked.get("max_completion_tokens")
        self.seen.append((time.monotonic(), asked["prompt"].encode(), most))
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "dummy"}
        events = [chunk | {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}]
        events.append(chunk | {"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._send(text.encode(), "text/event-stream")

    def _send(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def tokenizer(work: Path) -> Path:
    """Write a tokenizer whose tokens are bytes, in the layout of a hub's cache; return its folder."""
    folder = work / "hf" / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True, exist_ok=True)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in plain] + [chr(256 + place) for place in range(256 - len(plain))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"<|end|>": 256}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "fuse_unk": False, "byte_fallback": False}
    special = {"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False}
    added = [special | {"normalized": False, "special": True}]
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    (folder / "tokenizer.json").write_text(json.dumps(whole | none))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder.parents[1] / "refs").mkdir(exist_ok=True)
    (folder.parents[1] / "refs" / "main").write_text("0" * 40)
    return folder


def command(tool: str, url: str, rows: Path, block: int, folder: Path, out: Path) -> list[str]:
    """The command line of a tool."""
    if tool == "aiperf":
        return (
            f"aiperf profile --model dummy --url {url} --endpoint-type completions --streaming --tokenizer {NAME} "
            f"--input-file {rows} --custom-dataset-type mooncake_trace --fixed-schedule --isl-block-size {block} "
            f"--artifact-dir {out} --ui none"
        ).split()
    source = f"kind=mooncake,hash_id_block_size={block},source.kind=json_file,source.path={rows}"
    return (
        f"guidellm run --backend kind=openai_http,target={url},model=dummy,request_format=/v1/completions "
        f"--profile kind=replay --data {source} --tokenizer kind=hf_auto,model={folder} "
        f"--output kind=json,path={out}/report.json --disable-progress"
    ).split()


def shared(prompts: list[bytes]) -> list[int]:
    """For each prompt, the most leading bytes that it has in common with an earlier one."""

    def common(one: bytes, other: bytes) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )

    return [max((common(prompt, each) for each in prompts[:at]), default=0) for at, prompt in enumerate(prompts)]


def expected(path: str) -> tuple[list[tuple[float, int, int, bytes]], int]:
    """The requests of the trace: time in s, lengths, and two bytes per token of the prompt, equal where tokens are."""
    trace = load_trace(path)
    rows = []
    for request in trace:
        units = spell(request.units)
        ids = [units[at : at + 8] for at in range(0, len(units), 8)]
        tokens = b"".join(each * trace.unit_tokens for each in ids)[: 8 * request.num_prompt_tokens]
        rows.append((request.arrival_ns / 1e9, request.num_prompt_tokens, request.num_output_tokens, tokens))
    return rows, trace.unit_tokens


def main() -> None:
    """Run one tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--to", required=True, metavar="TOOL=BIN")
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    tool, _, place = arguments.to.partition("=")
    work = arguments.work
    out = work / tool
    out.mkdir(parents=True, exist_ok=True)
    rows = work / f"{tool}.jsonl"
    kvarts = [sys.executable, "-m", "kvarts"]
    convert = [*kvarts, "trace", "convert", arguments.trace, "--to", tool, "-o", str(rows)]
    said = subprocess.run(convert, check=True, stderr=subprocess.PIPE, text=True).stderr
    wanted, block = expected(arguments.trace)
    result = {"tool": tool, "requests": len(wanted), "said": said.splitlines()}
    if tool == "dynamo":
        with tempfile.TemporaryDirectory() as name:
            theirs, ours = Path(name) / "theirs.jsonl", Path(name) / "ours.jsonl"
            subprocess.run([f"{place}/python", "-c", DYNAMO, rows, str(block), theirs], check=True)
            engine = ["--profile", "mocker", "--pages", "4000", "--max-batched-tokens", "8192", "--max-seqs", "64"]
            subprocess.run([*kvarts, "replay", arguments.trace, *engine, "--requests", ours], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
            read = [json.loads(line) for line in theirs.read_text().splitlines()]
            own = [json.loads(line) for line in ours.read_text().splitlines()]
        own = sorted(own, key=lambda row: row["output_tokens"])
        read = sorted(read, key=lambda row: row["output_length"])
        names = {"arrival_time_ms": "arrival_ms", "input_length": "input_tokens", "first_token_ms": "first_token_ms",
                 "last_token_ms": "last_token_ms"}  # fmt: skip
        equal = sum(all(abs(a[theirs] - b[ours]) < 1e-3 for theirs, ours in names.items())
                    for a, b in zip(read, own, strict=True))  # fmt: skip
        print(json.dumps(result | {"read": len(read), "equal": equal}))
        return
    folder = tokenizer(work)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = command(tool, f"http://127.0.0.1:{server.server_port}", rows, block, folder, out)
    environment = {**os.environ, "HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([f"{place}/{words[0]}", *words[1:]], cwd=work, env=environment, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    (out / "output.txt").write_text(done.stdout)
    result |= {"exit_code": done.returncode, "sent": len(Recorder.seen)}
    of_output = {most: (at, prompt.replace(b"<|end|>", b"|")) for at, prompt, most in Recorder.seen}
    seen = [of_output[want[2]] for want in wanted if want[2] in of_output]
    if len(seen) == len(wanted):
        begun = min(at - want[0] for (at, _), want in zip(seen, wanted, strict=True))
        result["length"] = sum(len(row[1]) == want[1] for row, want in zip(seen, wanted, strict=True))
        result["time"] = sum(row[0] - begun - want[0] < 0.05 for row, want in zip(seen, wanted, strict=True))
        ours, theirs = shared([row[3] for row in wanted]), shared([row[1] for row in seen])
        result["read"] = [[len(row[1]), their] for row, their in zip(seen, theirs, strict=True)]
        pairs = [(own // 8, their) for own, their in zip(ours, theirs, strict=True)]
        result["prefix"] = sum(0 <= their - own < 16 for own, their in pairs)
        result["differ"] = [pair for pair in pairs if not 0 <= pair[1] - pair[0] < 16][:9]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
