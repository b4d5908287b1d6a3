"""vLLM's own tests of offloading, with kvarts inside: how many pass of how many, beside vLLM's own classes.

    pip download vllm==0.32.0 --no-deps --no-binary vllm && tar xzf vllm-0.32.0.tar.gz
    VLLM_VENV/bin/python benchmarks/upstream_vllm.py vllm-0.32.0

No test is changed: a plugin of pytest puts kvarts' class where vLLM's factory, or the test's module, has vLLM's. The
tests of the file tier look into vLLM's own file names, threads and lookups; of these, the plugin gives the names of
files, the events, and what the tests wait for. Those that look further in fail. Every test that fails is printed with
its error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest

FILES = {
    "tests/v1/kv_offload/cpu/test_manager.py": "KvartsCachePolicy",
    "tests/v1/kv_offload/cpu/policies/test_factory.py": "KvartsCachePolicy",
    "tests/v1/kv_offload/tiering/test_fs_tier.py": "KvartsFiles",
    "tests/v1/kv_offload/tiering/test_tiering_offloading.py": "KvartsCachePolicy",
    "tests/v1/kv_offload/tiering/test_factory.py": "KvartsFiles",
    "tests/v1/kv_offload/tiering/test_metrics.py": "KvartsCachePolicy",
}
"""Files of tests, and what takes the place of vLLM's class in each."""


class Outcomes:
    """A plugin that counts outcomes, and puts a class of kvarts in the place of vLLM's, unless `inside` is empty."""

    def __init__(self, inside: str) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        if inside == "KvartsCachePolicy":
            put_policy_inside()
        elif inside == "KvartsFiles":
            put_files_inside()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test that has ended, or whose fixture failed."""
        if report.when == "call" or report.outcome != "passed":
            if report.when == "teardown":
                return
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                self.failed.append(f"{report.nodeid.partition('::')[2]}: {str(crash and crash.message)[:160]!r}")


def put_policy_inside() -> None:
    """Let vLLM's factory return kvarts' order of eviction for "lru"."""
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    from kvarts.connect.vllm import KvartsCachePolicy

    CachePolicyFactory._registry["lru"] = lambda: KvartsCachePolicy


def put_files_inside() -> None:
    """Let the name of vLLM's file tier be kvarts', with the arguments that vLLM's takes."""
    from vllm.v1.kv_offload.tiering.fs import manager

    from kvarts.connect.vllm import KvartsFiles

    class FileSystemTierManager(KvartsFiles):  # type: ignore[misc]
        def __init__(self, *args: Any, root_dir: str, n_read_threads: int = 1, n_write_threads: int = 1, **more: Any):
            super().__init__(*args, directory=root_dir, disk="4GiB", **more)
            # A lookup is answered at once: what the tests wait for has happened.
            answered = SimpleNamespace(empty=lambda: False)
            self._lookup_manager = SimpleNamespace(_pending_results=answered)
            path_of = self._folder.pages._path
            self.file_mapper = SimpleNamespace(get_file_name=lambda key: str(path_of(key)))

        @property
        def events(self) -> Any:
            return self._events

    manager.FileSystemTierManager = FileSystemTierManager


def main() -> None:
    """Run the tests; with two arguments, those of one file in this process."""
    root = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        path, inside = sys.argv[2], sys.argv[3]
        os.chdir(root)
        sys.path.insert(0, str(root))
        outcomes = Outcomes(inside)
        options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--no-header", "--tb=short"]
        pytest.main([*options, "--rootdir", str(root), path], plugins=[outcomes])
        passed, total = outcomes.counts["passed"], sum(outcomes.counts.values())
        print(f"@ {passed} of {total}")
        for line in outcomes.failed:
            print(f"@   {line}")
        return
    for path, inside in FILES.items():
        for each in ("", inside):
            command = [sys.executable, __file__, str(root), path, each]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            told = [line[2:] for line in done.stdout.splitlines() if line.startswith("@ ")]
            print(f"{path}, {each or 'vLLM as it is'}: {told[0] if told else done.stderr[-300:]}", flush=True)
            for line in told[1:]:
                print(line)


if __name__ == "__main__":
    main()
