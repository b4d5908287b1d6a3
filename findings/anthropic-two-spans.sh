#!/usr/bin/env bash
# Anthropic's SDK traces itself: with an instrumentation, one call has two spans, which disagree on a stream.
#
# Guess, worded afterwards: opentelemetry-instrumentation-anthropic adds one span to a call, with the tokens of its
#   usage: 1,100 of the prompt (200 new, 800 read from the cache, 100 written to it) and 50 of the answer.
# Seen: the SDK writes a span of its own wherever OpenTelemetry is set up, so sums over spans double. And of a stream,
#   the instrumentation counts 51 output tokens: it adds the 1 of message_start to the 50 of message_delta, which is
#   cumulative.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" \
  anthropic==2.14.0 opentelemetry-instrumentation-anthropic==0.62.4 opentelemetry-sdk==1.45.1

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import anthropic
from opentelemetry import trace
from opentelemetry.instrumentation.anthropic import AnthropicInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

for name in ("anthropic", "opentelemetry-instrumentation-anthropic"):
    print(name, version(name))
USAGE = {"input_tokens": 200, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 100, "output_tokens": 50}
TEXT = {"type": "text", "text": "Hello"}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "model", "stop_sequence": None}
STREAM = (
    {
        "type": "message_start",
        "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": {**USAGE, "output_tokens": 1}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {**TEXT, "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": USAGE},
    {"type": "message_stop"},
)


class Server(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {**MESSAGE, "content": [TEXT], "stop_reason": "end_turn", "usage": USAGE}
        kind, answer = "application/json", json.dumps(message)
        if body.get("stream"):
            kind = "text/event-stream"
            answer = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in STREAM)
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
memory, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
trace.set_tracer_provider(provider)
AnthropicInstrumentor().instrument()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none")
call = {"model": "model", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello?"}]}


def spans():
    rows = [
        (span.name, span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"])
        for span in memory.get_finished_spans()
    ]
    memory.clear()
    return rows


client.messages.create(**call)
whole = spans()
for _ in client.messages.create(stream=True, **call):
    pass
stream = spans()
print("a call, with its input and output tokens:", whole)
print("the same as a stream:", stream)
assert whole == [("anthropic.messages.create", 1100, 50), ("anthropic.chat", 1100, 50)]
assert stream == [("anthropic.messages.create", 1100, 50), ("anthropic.chat", 1100, 51)]
PYTHON
