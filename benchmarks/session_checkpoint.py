"""How long the KV of a session takes to be on disk and back, beside numpy.save and numpy.load.

    python benchmarks/session_checkpoint.py [--directory DIR] [--rounds N]

The default is the shape of Qwen3-0.6B with 4 + 64 tokens in bfloat16: 28 layers, 8 KV heads of 128, 7,798,784 bytes.
Rows take turns, so that each meets the same neighbours; times are medians, with the least in brackets. The files of
`load` are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from zlib import crc32

import numpy as np

from kvarts.session.checkpoints import Checkpoint, CheckpointHeader, Checkpoints, Refused, token_digest

LAYERS, KV_HEADS, HEAD_DIM, TOKENS = 28, 8, 128, 68
SESSION = "0" * 32
FINGERPRINT = {"weights": "0" * 32, "dtype": "bfloat16", "sink": "4", "window": "64"}
HISTORY = np.arange(1000, dtype=np.uint32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where files are written; a temporary directory if left out")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (LAYERS, 2, TOKENS, KV_HEADS, HEAD_DIM)
    kv = rng.integers(0, 2**16, size=shape, dtype=np.uint16)
    arrays = {"kv": kv}
    header = CheckpointHeader(
        session_id=SESSION,
        fingerprint=FINGERPRINT,
        num_tokens=len(HISTORY),
        token_digest=token_digest(HISTORY),
        tables=((6, 57, 1),),
    )
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        checkpoints = Checkpoints(directory / "kv")
        plain = directory / "plain.npy"

        def save() -> None:
            assert not isinstance(checkpoints.save(header, arrays), Refused)

        def load() -> None:
            found = checkpoints.load(SESSION, FINGERPRINT, HISTORY)
            assert isinstance(found, Checkpoint)

        def numpy_save_synced() -> None:
            with plain.open("wb") as file:
                np.save(file, kv)
                file.flush()
                os.fsync(file.fileno())

        tasks: dict[str, Callable[[], object]] = {
            "Checkpoints.save": save,
            "numpy.save and fsync": numpy_save_synced,
            "numpy.save": lambda: np.save(plain, kv),
            "Checkpoints.load": load,
            "numpy.load": lambda: np.load(plain),
            "crc32 alone": lambda: crc32(kv.data),
            "blake2b alone": lambda: blake2b(kv.data).digest(),
        }
        times: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(args.rounds):
            for task, run in tasks.items():
                start = perf_counter()
                run()
                times[task].append(1e3 * (perf_counter() - start))
    print(f"{kv.nbytes:,} bytes, {args.rounds} rounds")
    for task, row in times.items():
        print(f"{task:<22}{statistics.median(row):8.2f} ms ({min(row):.2f})")


if __name__ == "__main__":
    main()
