#!/usr/bin/env bash
# SGLang's router compares texts of messages, without tools, adapters, salts or images.
#
# Guess: requests that share what an engine caches go to one worker: same tools before different questions, which every
#   chat template writes first. Requests that share nothing there do not: other tools, adapters, salts or images.
#   A prompt of token ids, which OpenAI's and vLLM's completions accept, is routed by its ids, as /generate does.
# Seen: 12 requests at once with the same 400 words of tools are spread 4, 4, 4; with other tools, images or adapters
#   and the same message, all 12 go to one worker. /v1/completions with token ids is refused with 422.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" sglang-router==0.3.2

cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version


class Server(ThreadingHTTPServer):
    request_queue_size = 128


class Worker:
    """An engine's HTTP interface, as far as a router asks for it: every answer is one token, after `delay_s`."""

    def __init__(self):
        self.seen, self.delay_s, self.fails, self.tokenizes = [], 0.0, False, True
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, code, value):
                body = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
                facts = {"model_path": "m", "served_model_name": "m", "is_generation": True}
                self.answer(200, models if self.path == "/v1/models" else facts if "info" in self.path else {})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                worker.seen.append(self.path)
                if self.path == "/tokenize" and worker.tokenizes:
                    text = asked.get("prompt") or json.dumps(asked["messages"])
                    tokens = [sum(map(ord, word)) for word in text.split()]
                    return self.answer(200, {"count": len(tokens), "max_model_len": 9999, "tokens": tokens})
                if self.path == "/tokenize" or "render" in self.path:
                    return self.answer(404, {"detail": "Not Found"})
                if worker.fails:
                    return self.answer(500, {"error": {"message": "the engine died", "code": 500}})
                time.sleep(worker.delay_s)
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                choice = {"index": 0, "text": "x", "finish_reason": "stop"}
                choice["message"] = {"role": "assistant", "content": "x"}
                head = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
                self.answer(200, {**head, "choices": [choice], "usage": usage})

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


class Router:
    """A router with its default policy, cache_aware, before three workers."""

    def __init__(self, package):
        self.name = f"{package} {version(package)}"
        self.workers = [Worker() for _ in range(3)]
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        launch = "sglang_router.launch_router" if package == "sglang-router" else "vllm_router.launch_router"
        command = ["venv/bin/python", "-m", launch, "--worker-urls", *(worker.url for worker in self.workers)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        with open("log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.5)
            try:
                workers = json.load(urllib.request.urlopen(f"{self.url}/workers"))["workers"]
                if sum(each["is_healthy"] for each in workers) == 3:
                    break
            except OSError:
                pass
        time.sleep(2.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def post(self, body, path="/v1/completions"):
        """Return the status of a request."""
        data = json.dumps({"model": "m", "max_tokens": 1, **body}).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as opened:
                return opened.status
        except urllib.error.HTTPError as error:
            return error.code

    def spread(self, bodies, path="/v1/completions", at_once=False):
        """Return how many of these requests each worker has computed, the most first."""
        for worker in self.workers:
            worker.seen.clear()
            worker.delay_s = 0.5 if at_once else 0.0
        with ThreadPoolExecutor(len(bodies) if at_once else 1) as pool:
            assert set(pool.map(lambda body: self.post(body, path), bodies)) == {200}
        return sorted((worker.seen.count(path) for worker in self.workers), reverse=True)


def words(seed, count=400):
    """Return random words: no two seeds share a prefix."""
    drawn = random.Random(seed)
    return " ".join(f"w{drawn.randrange(10**6)}" for _ in range(count))


CHAT = "/v1/chat/completions"


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def tools(seed):
    function = {"name": "find", "description": words(seed), "parameters": {"type": "object", "properties": {}}}
    return [{"type": "function", "function": function}]


def image(seed):
    url = "data:image/png;base64," + f"{seed:04d}" * 500
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words(7, 60)}]


with Router("sglang-router") as router:
    spread = {
        "same tools, other messages": router.spread(
            [chat(words(seed, 30), tools=tools(1)) for seed in range(12)], CHAT, at_once=True
        ),
        "other tools, same message": router.spread(
            [chat(words(50, 30), tools=tools(100 + seed)) for seed in range(12)], CHAT, at_once=True
        ),
        "other images, same question": router.spread([chat(image(seed)) for seed in range(12)], CHAT, at_once=True),
        "other adapters and salts, same prompt": router.spread(
            [{"prompt": words(60), "lora_path": f"a{seed}", "cache_salt": f"s{seed}"} for seed in range(12)],
            at_once=True,
        ),
    }
    refused = router.post({"prompt": list(range(500))})
print(f"{router.name}: token ids {refused}; of 12 requests at once:", spread)
assert refused == 422
assert list(spread.values()) == [[4, 4, 4], [12, 0, 0], [12, 0, 0], [12, 0, 0]]
PYTHON
