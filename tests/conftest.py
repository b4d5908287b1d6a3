from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from kvarts.base import processes
from kvarts.cli.main import main

# What collection makes stays: there is nothing to collect until `pytest_collection_finish`.
gc.disable()

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    # Test processes share the cores; set before the first import of torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # So replays go to other processes only where a test asks for these: each would import kvarts first.
    processes.PAYS_S = 60.0

# Without a GPU, Triton interprets its kernels; read when something first imports Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One test process compiles a module, and the others and the commands that tests start read its bytecode. Many container
# images set this variable, and then each process compiles every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Scripts can be imported, behind everything that is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

pytest.register_assert_rewrite("builders.laws", "builders.serving")

# Examples differ from run to run: the seed is printed at the end, and --hypothesis-seed repeats them.
settings.register_profile(
    "fast",
    max_examples=6,
    deadline=None,
    database=None,
    print_blob=True,
    # Of how examples are drawn, by chance of the seed: no law is broken.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.register_profile("laws", parent=settings.get_profile("fast"), max_examples=15)
settings.register_profile("search", parent=settings.get_profile("fast"), max_examples=500)
settings.register_profile("long", parent=settings.get_profile("fast"), max_examples=5000)
settings.load_profile(os.environ.get("KVARTS_HYPOTHESIS", "fast"))


# Hypothesis also tries constants of the modules that a test process has imported so far. Which these are depends on
# what else ran in it, and a seed would give other examples in each run.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


DATA = Path(str(files("kvarts") / "data"))


def pytest_xdist_auto_num_workers() -> int | None:
    """Half as many test processes again as there are cores: a third of the time is spent waiting for processes."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return (os.cpu_count() or 1) * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each test process begin with other files, so that most files are compiled once, not once per process."""
    report = yield
    if IS_WORKER and isinstance(collector, pytest.Dir) and report.result:
        rank = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = rank * len(report.result) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of the laws' examples, one for all test processes, unless the command line has one."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seed."""
    seed = config.option.hypothesis_seed
    terminalreporter.write_line(f"{settings().max_examples} examples per law; again: --hypothesis-seed={seed}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Restore the order of the files: test processes must agree on it. What opens a browser is slow."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    if IS_WORKER:
        items.sort(key=lambda item: item.path.parts)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the process that hands out the tests collect garbage: it collects no tests."""
    if session.config.pluginmanager.hasplugin("dsession"):
        gc.enable()


def pytest_collection_finish() -> None:
    """Exempt test modules and items, which live until the end, from garbage collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    gc.enable()


@pytest.fixture(scope="session")
def conversation_trace() -> Path:
    """The whole Mooncake conversation trace, where it is at hand: see KVARTS_DATA in CONTRIBUTING."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("KVARTS_DATA", default)) / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path}; set KVARTS_DATA to a folder with mooncake/conversation_trace.jsonl")
    return path


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `kvarts` with these arguments; its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["kvarts", *map(str, arguments)])
        return main()

    return run


@pytest.fixture
def refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str, str], str]:
    """Runs `kvarts replay` with a file c.toml and these arguments, which it refuses; what it says."""
    monkeypatch.chdir(tmp_path)

    def refused(file: str, arguments: str) -> str:
        Path("c.toml").write_text(file)
        code = run_command("replay", "--config", "c.toml", *arguments.split())
        said = capsys.readouterr().err
        assert code == 2, said
        return said

    return refused


@pytest.fixture
def asked(run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Any]:
    """Runs a command that prints JSON."""

    def ask(*arguments: object) -> Any:
        assert run_command(*arguments) == 0
        return json.loads(capsysbinary.readouterr().out)

    return ask


@pytest.fixture
def kvarts(
    capsysbinary: pytest.CaptureFixture[bytes], run_command: Callable[..., int]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `kvarts` with these arguments; its exit code, what it printed, and what it said beside."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_command(*arguments)
        captured = capsysbinary.readouterr()
        return code, captured.out.decode(), captured.err.decode()

    return run


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of the sample on a small pool, by the command itself, with all that is recorded."""
    return _made_once(tmp_path_factory, "recorded-run", _record_run)


def _record_run(path: Path) -> None:
    before = sys.argv
    sys.argv = ["kvarts", "replay", "--pages", "700", "--page-size", "512", "--run-dir", str(path)]
    try:
        assert main() == 0
    finally:
        sys.argv = before


def _made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return what `make` writes, by whichever test process needs it first; the others wait for it."""
    folder = factory.getbasetemp().parent if IS_WORKER else factory.getbasetemp()
    path = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


@pytest.fixture(scope="session")
def short_traces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a replay of two models, `chat` and `code`: the first 300 requests of each bundled Azure trace."""
    folder = tmp_path_factory.mktemp("traces")
    options = []
    for name, kind in (("chat", "conv"), ("code", "code")):
        path = folder / f"{name}.csv"
        with (DATA / f"azure-{kind}-1000.csv").open() as rows:
            path.write_text("".join(islice(rows, 301)))
        options += ["--trace", f"{name}={path}"]
    return options


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], Any]]:
    """Opens Chromium, in light or in dark."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        if os.environ.get("KVARTS_BROWSER") == "required":
            pytest.fail("KVARTS_BROWSER asks for chromium and chromedriver, which are not installed")
        pytest.skip("needs Debian's chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    opened = []

    def open_browser(dark: bool) -> Any:
        options = Options()
        options.binary_location = chromium
        profile = tmp_path_factory.mktemp("profile")
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1280,2400",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        opened.append(driver)
        return driver

    yield open_browser
    for driver in opened:
        driver.quit()
