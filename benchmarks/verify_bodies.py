"""What `kvarts verify` takes for a file of any size: eight kinds of bodies, the time a MB and the largest memory.

Each kind is written at several sizes, 1 GB the last, and judged by a process of its own.

    python benchmarks/verify_bodies.py [--largest 1000] [--folder DIR] [--only KIND]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MB = 1_000_000


def rows(start: int, count: int) -> str:
    """Return rows of steps, which hold every law."""
    out = []
    for step in range(start, start + count):
        used, before = 1000 + step % 700, 1000 + (step - 1) % 700 if step else 0
        row = {
            "step": step, "t_ms": step * 25.0, "used_blocks": used, "free_blocks": 4000 - used, "used_pct": used / 4000,
            "active_seqs": 12, "preempted_seqs": 0, "cached_blocks": 500, "allocated": max(0, used - before),
            "freed": max(0, before - used), "waiting": 7,
        }  # fmt: skip
        out.append(json.dumps(row, separators=(",", ":")))
    return ",\n".join(out)


HEAD = '"block_size_tokens":16,"total_blocks":4000,"peak_used_pct":0.42475,"preemption_count":0,"initial_used_blocks":0'
SMALL = rows(0, 1400)
BODY = f'{HEAD},"timeline":[{SMALL}]}}'


def repeated(before: str, part: str, after: str) -> Callable[[int], Iterator[str]]:
    def text(num_bytes: int) -> Iterator[str]:
        yield before
        block = part * (MB // len(part) + 1)
        for _ in range(num_bytes // len(block)):
            yield block
        yield after

    return text


def many_rows(num_bytes: int) -> Iterator[str]:
    yield f'{{{HEAD},"timeline":['
    done = step = 0
    while done < num_bytes:
        text = rows(step, 4900)  # whole periods of 700
        yield text if not step else ",\n" + text
        step += 4900
        done += len(text)
    yield "]}\n"


BAD_ROW = json.dumps(dict.fromkeys(json.loads(SMALL.partition(",\n")[0]), 7))

KINDS: dict[str, Callable[[int], Iterator[str]]] = {
    "rows": many_rows,
    "string before": repeated('{"comment":"', 'a\\"é ', f'",{BODY}'),
    "list before": repeated('{"list":[', "1,", f"2],{BODY}"),
    "objects before": repeated('{"list":[', '{"a":[{"b":"]"}]},', f"2],{BODY}"),
    "keys before": repeated("{", '"key":[1],', BODY),
    "space": repeated("{", " \n", BODY),
    "open brackets": repeated("", "[", ""),
    "rows that are wrong": repeated(f'{{{HEAD},"timeline":[', BAD_ROW + ",", f"{BAD_ROW}]}}"),
}


def measure(path: Path) -> tuple[int, float, float]:
    """Return the exit code of a process that judges `path`, its CPU seconds and its largest memory in MiB."""
    before = time.monotonic()
    pid = os.fork()
    if pid == 0:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        os.execv(sys.executable, [sys.executable, "-m", "kvarts", "verify", str(path)])
    _, status, usage = os.wait4(pid, 0)
    assert time.monotonic() >= before
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=1000, help="MB of the largest file")
    parser.add_argument("--folder", type=Path, help="where files are written, one at a time")
    parser.add_argument("--only", choices=KINDS)
    options = parser.parse_args()
    print(f"{'kind':<20} {'MB':>6} {'exit code':>10} {'CPU s':>8} {'ms a MB':>8} {'MiB':>6}")
    for kind in [options.only] if options.only else KINDS:
        for size in (options.largest // 16, options.largest // 4, options.largest):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                path = Path(folder) / "any.json"
                with path.open("w", encoding="utf-8") as file:
                    file.writelines(KINDS[kind](size * MB))
                num_mb = path.stat().st_size / MB
                code, seconds, memory = measure(path)
            print(f"{kind:<20} {num_mb:>6.0f} {code:>10} {seconds:>8.2f} {seconds / num_mb * 1e3:>8.1f} {memory:>6.0f}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
