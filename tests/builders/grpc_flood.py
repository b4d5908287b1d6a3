"""`python -m builders.grpc_flood ADDRESS METHOD BODY TOKEN SECONDS`: calls that are under way at once, again and again.

BODY is a file. Prints the codes of the calls as JSON. A process of its own, so that it takes no time of a test's other
clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

__all__ = ["flooding"]

NUM_CALLS = 100


async def flood(address: str, method: str, body: bytes, token: str) -> Counter[str]:
    """The codes of NUM_CALLS calls, over ten connections."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels: list[Any] = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CALLS // 10)]
    calls = [
        channels[number % len(channels)].unary_unary(method)(body, metadata=metadata, timeout=120)
        for number in range(NUM_CALLS)
    ]
    codes = Counter([(await call.code()).name for call in calls])
    for channel in channels:
        await channel.close()
    return codes


def flooding(address: str, method: str, body: Path, token: str, seconds: float) -> dict[str, int]:
    """Run it, and return the codes."""
    arguments = [address, method, str(body), token, str(seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "builders.grpc_flood", *arguments],
        check=True, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    codes: dict[str, int] = json.loads(done.stdout)
    return codes


def main(address: str, method: str, body: str, token: str, seconds: str) -> None:
    """Flood for so long."""
    codes: Counter[str] = Counter()
    data = Path(body).read_bytes()
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        codes += asyncio.run(flood(address, method, data, token))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
