"""Records the messages of a vLLM front end to a core, and the core's answers: a test decodes them.

    python scripts/record_front_end.py --vllm DIR/bin/vllm OUTPUT_FOLDER

The file is exchange-VERSION.jsonl in the folder: one line per message, with its frames in hexadecimal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from kvarts.doors.vllm_front.core import Behind  # noqa: E402
from kvarts.doors.vllm_front.front_end import FrontEnd, Installed, free_port  # noqa: E402
from kvarts.doors.vllm_front.link import Addresses, Link  # noqa: E402
from kvarts.doors.vllm_front.model import FrontModel  # noqa: E402
from kvarts.doors.vllm_front.opening import FrontSettings, open_core  # noqa: E402
from kvarts.doors.vllm_front.protocol import protocol_of  # noqa: E402

from builders.fake_front_end import ENGINE  # noqa: E402  # after the path
from builders.tiny_model import tiny_model  # noqa: E402

LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
CHAT = [{"role": "user", "content": "hello"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "the people said", "max_tokens": 3, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [116, 104, 101], "max_tokens": 2, "n": 2, "seed": 7, "stop_token_ids": [5]}),
    ("/v1/completions", {"prompt": "the", "max_tokens": 2, "logprobs": 2, "echo": True, "priority": 0}),
    ("/v1/completions", {"prompt": "the", "max_tokens": 2, "cache_salt": "tenant", "min_tokens": 1}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "stream": True}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "vllm_xargs": {"kvarts_answer": '{"text": "yes"}'}}),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [LOOK], "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": CHAT, "structured_outputs": {"regex": "[0-9]{3}"}}),
    ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "/adapters/mine"}),
    ("/v1/completions", {"prompt": "the", "max_tokens": 2, "model": "mine"}),
    ("/reset_prefix_cache", {}),
    ("/sleep?level=1", {}),
    ("/wake_up", {}),
    ("/pause", {}),
    ("/resume", {}),
    ("/collective_rpc", {"method": "check"}),
]


class TappedLink(Link):
    """A Link that keeps all messages in `lines`."""

    lines: list[dict[str, Any]] = []  # noqa: RUF012  # of the only link

    def connect(self, addresses: Addresses, ready: bytes) -> None:
        """Connect, and keep the ready response."""
        self.lines.append({"from": "core", "what": "ready", "frames": [ready.hex()]})
        super().connect(addresses, ready)

    def received(self) -> Iterator[list[list[bytes]]]:
        """Yield messages, and keep them."""
        for messages in super().received():
            for frames in messages:
                self.lines.append({"from": "front", "frames": [frame.hex() for frame in frames]})
            yield messages

    def send(self, client: int, payload: bytes) -> None:
        """Send a message, and keep it."""
        self.lines.append({"from": "core", "what": "outputs", "frames": [payload.hex()]})
        super().send(client, payload)


def main() -> None:
    """Record the exchange of one version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", default="vllm", help="the script of vLLM")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    from kvarts.doors.vllm_front import opening

    setattr(opening, "Link", TappedLink)  # noqa: B010  # an import of that module
    installed = Installed.at(options.vllm)
    with tempfile.TemporaryDirectory() as directory:
        path = tiny_model(Path(directory))
        arguments = ["--max-model-len", "1024", "--enable-lora", "--enable-auto-tool-choice", "--tool-call-parser",
                     "hermes", "--served-model-name", "tiny"]  # fmt: skip
        with FrontEnd(installed, path, host="127.0.0.1", port=free_port(), arguments=arguments) as front:
            settings = FrontSettings(handshake=front.handshake, behind=Behind(max_model_len=1024), start_s=600.0)
            protocol = protocol_of(installed.version)
            core = open_core(ENGINE, FrontModel(path), protocol, settings, goes_on=front.check)
            serving = Thread(target=core.serve)
            serving.start()
            front.wait_until_up()
            for url, body in CALLS:
                connection = HTTPConnection("127.0.0.1", front.port, timeout=60)
                told = json.dumps({"model": "tiny", **body})
                connection.request("POST", url, told, {"content-type": "application/json"})
                answer = connection.getresponse()
                print(url, answer.status, answer.read()[:80])
                assert answer.status == 200
            core.stop()
            serving.join()
            core.close()
    name = f"exchange-{'.'.join(installed.version.split('.')[:2])}.jsonl"
    (options.folder / name).write_text("".join(json.dumps(line) + "\n" for line in TappedLink.lines))


if __name__ == "__main__":
    main()
