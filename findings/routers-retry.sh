#!/usr/bin/env bash
# A retry of SGLang's and vLLM's routers goes to the worker that has just failed.
#
# Guess: if one of three workers answers 500, a router retries the request on another worker: the client sees 200.
# Seen: all five attempts go to the same worker, since cache_aware finds the prompt's prefix there, and the client gets
#   the 500. So does the next request with that prompt; only then has the circuit breaker counted ten failures.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" sglang-router==0.3.2 vllm-router==0.1.17

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


for package in ("sglang-router", "vllm-router"):
    with Router(package) as router:
        prompt = {"prompt": words(1)}
        assert router.post(prompt) == 200
        [worker] = [worker for worker in router.workers if "/v1/completions" in worker.seen]
        worker.fails = True
        worker.seen.clear()
        codes = [router.post(prompt) for _ in range(3)]
        num_attempts = worker.seen.count("/v1/completions")
    print(f"{router.name}: statuses {codes}, {num_attempts} attempts at the worker that fails")
    assert (codes, num_attempts) == ([500, 500, 200], 10)
PYTHON
