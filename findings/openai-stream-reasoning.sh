#!/usr/bin/env bash
# OpenTelemetry for OpenAI: the span of a stream has no reasoning tokens, that of a whole answer has.
#
# Guess: a call has the same token counts whether it is streamed or not, if the stream ends with usage: 10,000 of the
#   prompt, 8,000 of them from the cache, 200 of the answer, 150 of them of reasoning.
# Seen: opentelemetry-instrumentation-openai writes gen_ai.usage.reasoning_tokens for a whole answer, and leaves it out
#   for a stream with the same usage; cached tokens are there both times. OpenInference has all counts both times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" openai==3.57.0 opentelemetry-sdk==1.45.2 \
  opentelemetry-instrumentation-openai==0.62.4 openinference-instrumentation-openai==0.1.66

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import openai
from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference
from opentelemetry.instrumentation.openai import OpenAIInstrumentor as OpenLlmetry
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

for name in ("openai", "opentelemetry-instrumentation-openai", "openinference-instrumentation-openai"):
    print(name, version(name))
USAGE = {
    "prompt_tokens": 10_000,
    "completion_tokens": 200,
    "total_tokens": 10_200,
    "prompt_tokens_details": {"cached_tokens": 8_000},
    "completion_tokens_details": {"reasoning_tokens": 150},
}
HEAD = {"id": "c", "created": 1, "model": "gpt-5"}
TEXT = {"role": "assistant", "content": "Hi"}


class Server(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        is_stream = json.loads(self.rfile.read(int(self.headers["content-length"]))).get("stream")
        if is_stream:
            chunk = {**HEAD, "object": "chat.completion.chunk"}
            events = [{**chunk, "choices": [{"index": 0, "delta": TEXT, "finish_reason": "stop"}]}]
            events.append({**chunk, "choices": [], "usage": USAGE})
            answer = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        else:
            choice = {"index": 0, "message": TEXT, "finish_reason": "stop"}
            answer = json.dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()


def counts(instrumentor):
    """The numbers of tokens in the spans of a whole answer and of a stream."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    instrumentor.instrument(tracer_provider=provider)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
    call = {"model": "gpt-5", "messages": [{"role": "user", "content": "Hello?"}]}
    found = []
    for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        answer = client.chat.completions.create(**call, **more)
        if more:
            list(answer)
        (span,) = memory.get_finished_spans()
        memory.clear()
        found.append(sorted(value for name, value in span.attributes.items() if "token" in name))
    instrumentor.uninstrument()
    return found


seen = {"OpenTelemetry": counts(OpenLlmetry()), "OpenInference": counts(OpenInference())}
for name, (whole, stream) in seen.items():
    print(f"{name}: whole {whole}, stream {stream}")
ALL = [150, 200, 8_000, 10_000, 10_200]
assert seen == {"OpenTelemetry": [ALL, ALL[1:]], "OpenInference": [ALL, ALL]}
PYTHON
