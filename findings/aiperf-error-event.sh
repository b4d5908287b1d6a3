#!/usr/bin/env bash
# AIPerf counts a stream that ends in an error event as a success.
#
# Guess: a server whose engine dies after five tokens sends an event with "error" and [DONE], as vLLM does: the request
#   fails in AIPerf, as a refused one does.
# Seen: all requests are successes, with the tokens before the error, and none is an error. Benches on a failing server
#   report short answers instead of failures.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" aiperf==0.13.0

"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

print("aiperf", version("aiperf"))
folder = Path(sys.argv[1])
# A tokenizer of whole words, in the layout of the hub's cache.
model = folder / "hf/hub/models--local--words/snapshots/0"
model.mkdir(parents=True)
(folder / "hf/hub/models--local--words/refs").mkdir()
(folder / "hf/hub/models--local--words/refs/main").write_text("0")
vocabulary = {"<unk>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, 4096)}}
words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
split = {"type": "WhitespaceSplit"}
(model / "tokenizer.json").write_text(
    json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": words, **none})
)
told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
(model / "tokenizer_config.json").write_text(json.dumps(told))
(model / "config.json").write_text('{"model_type": "qwen3"}')


class Server(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body, kind):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(b'{"object": "list", "data": [{"id": "dummy"}]}', "application/json")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "dummy"}
        choices = [{"index": 0, "delta": {"content": f" w{10 + each}"}, "finish_reason": None} for each in range(5)]
        events = [{**head, "choices": [choice]} for choice in choices]
        events.append({"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.answer(text.encode(), "text/event-stream")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
command = [
    f"{folder}/venv/bin/aiperf", "profile", "--model", "dummy", "--url", f"http://127.0.0.1:{server.server_port}",
    "--endpoint-type", "chat", "--streaming", "--tokenizer", "local/words", "--concurrency", "1", "--request-count",
    "8", "--isl", "20", "--osl", "10", "--artifact-dir", f"{folder}/out", "--ui", "none",
]
environment = {**os.environ, "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
assert done.returncode == 0, done.stdout[-2000:]
report = json.loads((folder / "out/profile_export_aiperf.json").read_text())
seen = {name: (report.get(name) or {}).get("avg") for name in ("request_count", "error_request_count")}
seen["output_sequence_length"] = report["output_sequence_length"]["avg"]
print("8 streams that end in an error event:", seen)
assert seen["request_count"] == 8
assert not seen["error_request_count"]
assert seen["output_sequence_length"] == 5
PYTHON
