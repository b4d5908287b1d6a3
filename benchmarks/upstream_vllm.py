"""vLLM's own tests of offloading, with kvarts inside: how many pass of how many, beside vLLM's own classes.

    pip download vllm==0.32.0 --no-deps --no-binary vllm && tar xzf vllm-0.32.0.tar.gz
    VLLM_VENV/bin/python benchmarks/upstream_vllm.py vllm-0.32.0

No test is changed: a plugin of pytest puts kvarts' class where vLLM's factory, or the test's module, has vLLM's. The
tests of the connector script what its manager answers; kvarts' manager gets every call, answers those that are not
scripted, and its tier must hold its laws after each test. A page that a script finds is put into the tier first. The
tests of the file tier look into vLLM's own file names, threads and lookups; of these, the plugin gives the names of
files, the events, and what the tests wait for. Those that look further in fail. Every test that fails is printed with
its error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, MagicMock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest

CONNECTOR = "tests/v1/kv_connector/unit/offloading_connector"
FILES = {
    "tests/v1/kv_offload/cpu/test_manager.py": "KvartsCachePolicy",
    "tests/v1/kv_offload/cpu/policies/test_factory.py": "KvartsCachePolicy",
    "tests/v1/kv_offload/tiering/test_fs_tier.py": "KvartsFiles",
    "tests/v1/kv_offload/tiering/test_tiering_offloading.py": "KvartsCachePolicy",
    "tests/v1/kv_offload/tiering/test_factory.py": "KvartsFiles",
    "tests/v1/kv_offload/tiering/test_metrics.py": "KvartsCachePolicy",
    f"{CONNECTOR}/test_scheduler.py": "KvartsManager",
    f"{CONNECTOR}/test_events.py": "KvartsManager",
    f"{CONNECTOR}/test_metrics.py": "KvartsManager",
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
        elif inside == "KvartsManager":
            put_manager_inside()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test that has ended, or whose fixture failed."""
        if report.when == "call" or report.outcome != "passed":
            if report.when == "teardown":
                return
            self.counts[report.outcome] += 1
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                self.failed.append(f"{report.nodeid.partition('::')[2]}: {str(crash and crash.message)[:160]!r}")

    def pytest_runtest_teardown(self) -> None:
        """Check the tiers of the managers that the test had."""
        while MANAGERS:
            MANAGERS.pop().store.host.check()


OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}
"""The sizes of the model whose configuration the tests of the connector would ask a hub for."""
MANAGERS: list[Any] = []
NUM_PLACES = 100_000


def make_manager(num_chunks: int = NUM_PLACES, **_: Any) -> Any:
    """Return a manager of kvarts, with host memory only."""
    from kvarts.core.tiers.keyed import KeyedTier
    from kvarts.doors.vllm.manager import KvartsManager
    from kvarts.doors.vllm.store import KeyStore

    region = SimpleNamespace(unlink=lambda: None)
    MANAGERS.append(KvartsManager(KeyStore(KeyedTier(num_chunks), tells=True), region))  # type: ignore[arg-type]
    return MANAGERS[-1]


class Followed(MagicMock):
    """A method of a manager that a test may script; kvarts' manager gets the same call, and else answers it."""

    def _get_child_mock(self, /, **more: Any) -> Any:
        return MagicMock(**more)

    def _mock_call(self, /, *args: Any, **more: Any) -> Any:
        name, real = self.followed
        is_scripted = self._mock_return_value is not DEFAULT or self.side_effect is not None
        answer = super()._mock_call(*args, **more)  # of the real manager, unless scripted
        if not is_scripted:
            return answer
        if name == "lookup" and getattr(answer, "name", "") == "HIT":
            real.store.host.settle(real.store.host.place(args[:1])[0])
        elif name == "prepare_store":
            if answer is not None:
                stored = real.prepare_store(list(answer.keys_to_store), *args[1:], **more)
                assert set(stored.keys_to_store) <= set(answer.keys_to_store)
        else:
            getattr(real, name)(*args, **more)
        return answer


def put_manager_inside() -> None:
    """Let kvarts' manager follow those that the tests script, and be the one that they make of vLLM."""
    utils: Any = importlib.import_module(f"{CONNECTOR.replace('/', '.')}.utils")
    from vllm.v1.kv_offload.cpu import manager as of_host

    importlib.import_module("vllm.v1.kv_offload.tiering.manager")  # a subclass of vLLM's, which stays
    of_host.CPUOffloadingManager = make_manager
    scripted: tuple[str, ...] = (
        "lookup",
        "prepare_store",
        "complete_load",
        "complete_store",
        "touch",
        "on_new_request",
        "take_events",
    )
    scripted += ("on_request_finished", "on_schedule_end", "has_pending_work", "reset_cache", "get_stats", "shutdown")

    class MockOffloadingSpec(utils.MockOffloadingSpec):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            real = make_manager()
            for name in scripted:
                method = Followed(wraps=getattr(real, name))
                method.followed = name, real
                setattr(self.manager, name, method)

            def prepare_load(keys: Any, req_context: Any) -> Any:
                keys = list(keys)
                real.store.host.place(keys)  # those that a script found
                real.store.host.settle(keys)
                real.prepare_load(keys, req_context)
                return utils.MockLoadStoreSpec(keys)

            self.manager.prepare_load = prepare_load

    utils.MockOffloadingSpec = MockOffloadingSpec


def put_policy_inside() -> None:
    """Let vLLM's factory return kvarts' order of eviction for "lru"."""
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    from kvarts.doors.vllm import KvartsCachePolicy

    CachePolicyFactory._registry["lru"] = lambda: KvartsCachePolicy


def put_files_inside() -> None:
    """Let the name of vLLM's file tier be kvarts', with the arguments that vLLM's takes."""
    from vllm.v1.kv_offload.tiering.fs import manager

    from kvarts.doors.vllm import KvartsFiles

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


def run_tests(path: str, inside: str) -> None:
    """Run the tests of a file of the current directory, and print how many pass."""
    outcomes = Outcomes(inside)
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--no-header", "--tb=short"]
    if path.startswith(CONNECTOR):
        options += ["-p", f"{CONNECTOR.replace('/', '.')}.conftest"]  # for its fixture only
    pytest.main([*options, "--rootdir", str(Path.cwd()), path], plugins=[outcomes])
    print(f"@ {outcomes.counts['passed']} of {sum(outcomes.counts.values())}")
    for line in outcomes.failed:
        print(f"@   {line}")


def main() -> None:
    """Run the tests; with two arguments, those of one file in this process."""
    root = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        path, inside = sys.argv[2], sys.argv[3]
        os.environ["HF_HUB_OFFLINE"] = "1"
        with TemporaryDirectory() as folder:  # the tests without the sources of vLLM, which is installed
            os.chdir(folder)
            Path("tests").symlink_to(root / "tests")
            Path("facebook/opt-125m").mkdir(parents=True)
            Path("facebook/opt-125m/config.json").write_text(json.dumps(OPT))
            sys.path.insert(0, folder)
            run_tests(path, inside)
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
