"""Choices of sglang-router before scripted workers, as the cases of tests/sim/routers/test_sglang_choices.py.

    PYTHON benchmarks/sglang_router.py > tests/sim/routers/data/sglang-router-0.3.2.json

PYTHON has sglang-router and aiohttp; no GPU is needed, and kvarts is not used. Prompts share prefixes, are sent one at
a time or are held by their workers in bursts, and a token is four equal characters, so that texts part where tokens do.
"""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from importlib.metadata import version
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

CASES: tuple[tuple[int, dict[str, float]], ...] = (
    (2, {}),
    (4, {}),
    (2, {"balance_abs_threshold": 2, "balance_rel_threshold": 1.5}),
    (4, {"balance_abs_threshold": 1, "balance_rel_threshold": 1.2, "cache_threshold": 0.5}),
)
"""Workers, and options of the router."""
EACH = 5
"""Sequences of a case, alone and in bursts."""
FIRST_LETTER = 0x4E00
LETTERS = 64
NAMES = ("/health", "/get_server_info", "/server_info", "/get_model_info", "/model_info", "/v1/models")
HELLO = {"model_path": "m", "model_id": "m", "tp_size": 1, "dp_size": 1, "object": "list", "data": [{"id": "m"}]}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Rig:
    """A router and its workers, each of which answers at once, or holds a request until it is released."""

    def __init__(self, num_workers: int, options: dict[str, float]) -> None:
        self.ports = [free_port() for _ in range(num_workers)]
        self.port = free_port()
        self.options = options
        self.worker_of: dict[str, int] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Rig:
        for worker, port in enumerate(self.ports):
            app = web.Application()
            app.router.add_post("/generate", self._answer(worker))
            for name in NAMES:
                app.router.add_get(name, self._hello)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.runners.append(runner)
        options = [text for name, value in self.options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-port", str(free_port()), "--policy", "cache_aware", "--log-level", "error"]
        self.process = subprocess.Popen(
            [*command, *options, "--worker-urls", *urls], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.session = ClientSession(timeout=ClientTimeout(total=60), connector=TCPConnector(limit=0))
        for _ in range(300):
            try:
                async with self.session.get(f"http://127.0.0.1:{self.port}/readiness") as answer:
                    if answer.status == 200:
                        break
            except ClientError:
                pass
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)  # all workers are known
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()
        self.process.terminate()
        self.process.wait(10)
        for runner in self.runners:
            await runner.cleanup()

    async def _hello(self, request: web.Request) -> web.Response:
        return web.json_response(HELLO)

    def _answer(self, worker: int) -> Any:
        async def answer(request: web.Request) -> web.Response:
            name = (await request.json())["rid"]
            self.worker_of[name] = worker
            if name in self.held:
                await self.held[name].wait()
            meta = {"id": name, "finish_reason": {"type": "length"}, "prompt_tokens": 1, "completion_tokens": 1}
            return web.json_response({"text": "x", "meta_info": meta})

        return answer

    async def send(self, name: str, text: str) -> asyncio.Task[None]:
        """Send a request that its worker holds; return when one has it."""
        self.held[name] = asyncio.Event()
        task = asyncio.create_task(self._post(name, text))
        while name not in self.worker_of and not task.done():
            await asyncio.sleep(0.002)
        return task

    async def release(self, name: str, task: asyncio.Task[None]) -> None:
        """Let a request end, and the router know."""
        self.held.pop(name).set()
        await task
        await asyncio.sleep(0.02)

    async def _post(self, name: str, text: str) -> None:
        asked = {"text": text, "rid": name, "sampling_params": {"max_new_tokens": 1}}
        async with self.session.post(f"http://127.0.0.1:{self.port}/generate", json=asked) as answer:
            await answer.read()

    async def order(self) -> dict[int, int]:
        """Return the place of each worker in the router's own list: requests that are held go to each in turn."""
        tasks = {f"order-{place}": await self.send(f"order-{place}", chr(0x3400 + place) * 40) for place, _ in
                 enumerate(self.ports)}  # fmt: skip
        places = {self.worker_of[name]: place for place, name in enumerate(tasks)}
        for name, task in tasks.items():
            await self.release(name, task)
        return places


def prompts(draw: random.Random) -> list[list[int]]:
    """Return prompts of up to 28 tokens, most of which begin with one of three prefixes."""
    bases = [[draw.randrange(60) for _ in range(draw.choice([4, 10, 20]))] for _ in range(3)]
    found = []
    for _ in range(30):
        base = draw.choice(bases)
        tokens = base[: draw.randrange(len(base) + 1)]
        found.append(tokens + [draw.randrange(60) for _ in range(draw.choice([0, 1, 3, 8]))] or [1])
    return found


async def sequence(rig: Rig, places: dict[int, int], number: int, *, is_burst: bool) -> list[list[Any]]:
    """Return the events of a sequence: a request, its tokens and its worker's place; or a request that ended."""
    draw = random.Random(number)
    events: list[list[Any]] = []
    held: dict[int, asyncio.Task[None]] = {}
    for index, tokens in enumerate(prompts(draw)):
        name = f"{number}-{index}"
        text = "".join(chr(FIRST_LETTER + number * LETTERS + token) * 4 for token in tokens)
        held[index] = await rig.send(name, text)
        events.append([index, tokens, places[rig.worker_of[name]]])
        while held and (not is_burst or draw.random() < (0.45 if len(held) < 10 else 0.7)):
            ended = draw.choice(sorted(held))
            await rig.release(f"{number}-{ended}", held.pop(ended))
            events.append([ended])
    for index, task in held.items():
        await rig.release(f"{number}-{index}", task)
        events.append([index])
    return events


async def main() -> None:
    """Print the sequences."""
    found: list[dict[str, Any]] = []
    for num_workers, options in CASES:
        async with Rig(num_workers, options) as rig:
            places = await rig.order()
            for kind in ("alone", "bursts"):
                for _ in range(EACH):
                    events = await sequence(rig, places, len(found), is_burst=kind == "bursts")
                    found.append({"workers": num_workers, "options": options, "kind": kind, "events": events})
    print(json.dumps({"sglang_router": version("sglang-router"), "sequences": found}, separators=(",", ":")))


if __name__ == "__main__":
    asyncio.run(main())
