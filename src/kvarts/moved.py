"""Modules that have moved, under their names of 0.1, which can be imported for one release.

Each import of an old name warns and says the new name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # their module is slow to import, and the import system asks only for their methods
    Loader = MetaPathFinder = object

__all__ = ["MOVED", "MOVED_NAMES", "install", "moved_name", "names_moved_from"]

MOVED = {
    "kvarts.executor.sim": "kvarts.executor.simulated",
    "kvarts.kv.memory": "kvarts.sharing.memory",
    "kvarts.kv.shared": "kvarts.sharing.part",
    "kvarts.live.engine": "kvarts.llm.llm",
    "kvarts.live.profile": "kvarts.llm.profile",
    "kvarts.live.record": "kvarts.executor.recorder",
    "kvarts.live.text": "kvarts.llm.text",
    "kvarts.offload.policy": "kvarts.offload.store_policy",
    "kvarts.offload.transfer": "kvarts.kv.transfer",
    "kvarts.planner": "kvarts.hardware",
    "kvarts.planner.device": "kvarts.hardware.device",
    "kvarts.planner.dtypes": "kvarts.hardware.dtypes",
    "kvarts.planner.fit": "kvarts.hardware.fit",
    "kvarts.planner.geometry": "kvarts.hardware.geometry",
    "kvarts.replayer.azure": "kvarts.traffic.tables",
    "kvarts.replayer.columns": "kvarts.report.requests",
    "kvarts.replayer.config": "kvarts.sim.config",
    "kvarts.replayer.driver": "kvarts.sim.driver",
    "kvarts.replayer.formats": "kvarts.traffic.formats",
    "kvarts.replayer.hardware": "kvarts.sim.hardware",
    "kvarts.replayer.lane": "kvarts.sharing.turns",
    "kvarts.replayer.mooncake": "kvarts.traffic.mooncake",
    "kvarts.replayer.report": "kvarts.report.report",
    "kvarts.replayer.router": "kvarts.sim.router",
    "kvarts.replayer.shared": "kvarts.sharing.replay",
    "kvarts.replayer.sharedreport": "kvarts.sharing.report",
    "kvarts.replayer.sharing": "kvarts.sharing.config",
    "kvarts.replayer.source": "kvarts.traffic.source",
    "kvarts.replayer.trace": "kvarts.traffic.trace",
    "kvarts.replayer.workingset": "kvarts.traffic.working_set",
    "kvarts.replayer.workload": "kvarts.traffic.workload",
    "kvarts.sched.budget": "kvarts.sharing.budget",
    "kvarts.sched.device": "kvarts.sharing.device",
    "kvarts.sched.donors": "kvarts.sharing.donors",
    "kvarts.sched.loans": "kvarts.sharing.loans",
    "kvarts.timeline.auditbelow": "kvarts.audit.tiers",
    "kvarts.timeline.auditor": "kvarts.audit.auditor",
    "kvarts.timeline.chunk": "kvarts.verify.chunk",
    "kvarts.timeline.hits": "kvarts.explain.hits",
    "kvarts.timeline.live": "kvarts.record.live",
    "kvarts.timeline.page": "kvarts.report.page",
    "kvarts.timeline.reader": "kvarts.verify.reader",
    "kvarts.timeline.record": "kvarts.record.timeline",
    "kvarts.timeline.render": "kvarts.report.render",
    "kvarts.timeline.rows": "kvarts.columns",
    "kvarts.timeline.spans": "kvarts.report.steps",
    "kvarts.timeline.story": "kvarts.explain.story",
    "kvarts.timeline.turnlog": "kvarts.sharing.steps",
    "kvarts.timeline.verifier": "kvarts.verify.verifier",
}
"""New names of modules by their old names."""

MOVED_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "kvarts.engine": {"kvarts.event_log": ("Observer=EventReader",), "kvarts.sched.policy": ("NEVER_NS",)},
    "kvarts.events": {"kvarts.event_log": ("StepSink=EventReader",)},
    "kvarts.hardware.geometry": {"kvarts.hardware.model_config": ("load_geometry", "preset_names")},
    "kvarts.live": {},
    "kvarts.offload.lane": {"kvarts.offload.channel": ("Lane=Channel",)},
    "kvarts.replayer": {
        "kvarts.report.report": ("Report",),
        "kvarts.sim.config": ("ReplayConfig",),
        "kvarts.sim.replay": ("replay",),
        "kvarts.traffic.formats": ("load_trace",),
        "kvarts.traffic.mooncake": ("load_mooncake",),
        "kvarts.traffic.trace": ("Trace", "TraceRequest"),
        "kvarts.traffic.workload": ("Workload",),
    },
    "kvarts.sched.rows": {"kvarts.sched.input_batch": ("LiveRows=InputBatch",)},
    "kvarts.timeline": {
        "kvarts.audit.auditor": ("AuditError", "Auditor", "Finding"),
        "kvarts.audit.ledger": ("PageLedger",),
        "kvarts.audit.signals": (
            "BlockInUseError",
            "FullBlock",
            "LedgerError",
            "NotUniqueError",
            "PartialBlock",
            "UnknownBlockError",
        ),
        "kvarts.explain.hits": ("HitLedger", "hit_ledger"),
        "kvarts.explain.reading": ("Journal", "load_journal"),
        "kvarts.explain.story": ("story_of_block", "story_of_request"),
        "kvarts.record.journal": ("JournalWriter",),
        "kvarts.record.live": ("LiveTimeline",),
        "kvarts.record.timeline": ("Timeline",),
        "kvarts.report.steps": ("StepLog",),
        "kvarts.verify.verifier": ("Verdict", "verify", "verify_file"),
    },
    "kvarts.timeline.journal": {
        "kvarts.explain.reading": ("Journal", "load_journal"),
        "kvarts.journal": (
            "JOURNAL_VERSION",
            "REASONS",
            "AdmittedLine",
            "AnyLine",
            "ArrivedLine",
            "BlockedLine",
            "CancelledLine",
            "ComputedLine",
            "FinishedLine",
            "Line",
            "LoadedLine",
            "LoadingLine",
            "PreemptedLine",
            "RejectedLine",
            "RemovedBelowLine",
            "RemovedLine",
            "StoreFailedLine",
            "StoredBelowLine",
            "StoredLine",
            "StoringLine",
        ),
        "kvarts.record.journal": ("JournalWriter",),
    },
    "kvarts.timeline.ledger": {
        "kvarts.audit.ledger": ("PageLedger",),
        "kvarts.audit.signals": (
            "Block",
            "BlockInUseError",
            "BlocksRemoved",
            "BlocksStored",
            "Deref",
            "Destroy",
            "FullBlock",
            "Keep",
            "LedgerError",
            "LedgerEvent",
            "NotUniqueError",
            "PartialBlock",
            "PrefillCost",
            "Promote",
            "Signal",
            "Unkeep",
            "UnknownBlockError",
            "Use",
        ),
    },
    "kvarts.timeline.rules": {
        "kvarts.verify.rule": ("MAX_LISTED", "RuleResult", "Status", "Violation"),
        "kvarts.verify.limits": ("Limits",),
        "kvarts.verify.rules": ("make_rules",),
    },
    "kvarts.timeline.rundir": {
        "kvarts.report.run_directory": (
            "DISTRIBUTIONS",
            "EVENTS",
            "REPORT",
            "REQUESTS",
            "TIMELINE",
            "RunDir=RunDirectory",
            "named",
            "per_replica",
        ),
    },
}
"""Modules and packages with names that have moved to other modules: by new module, the names it has now.

OLD=NEW is a name that has changed as well. Modules that are still there ask `moved_name`.
"""


def warn_moved(old: str, new: str, *, num_frames: int) -> None:
    """Warn that `old` is called `new` now, on behalf of the code that imports it, `num_frames` above the caller."""
    message = f"{old} is now {new}; the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=num_frames + 2)


def moved_name(module: str, name: str) -> object:
    """Return what `name` of `module` stands for now, and warn. Raise AttributeError if it was never there."""
    for new, names in MOVED_NAMES.get(module, {}).items():
        for spelled in names:
            old_name, _, new_name = spelled.partition("=")
            if name == old_name:
                new_name = new_name or name
                # Above are the `__getattr__` of the module and the code that asks.
                warn_moved(f"{module}.{name}", f"{new}.{new_name}", num_frames=2)
                return getattr(import_module(new), new_name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def names_moved_from(module: str) -> Callable[[str], object]:
    """Return what `module` is to have as its `__getattr__`."""

    def look_up(name: str) -> object:
        return moved_name(module, name)

    return look_up


class _MovedLoader(Loader):
    """A loader that loads an old name as the module that has its new name."""

    def __init__(self) -> None:
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module with the new name, or one that looks up where its names have moved."""
        new = MOVED.get(spec.name)
        if new is None:
            return _SplitModule(spec.name)
        warn_moved(spec.name, new, num_frames=1)
        module = import_module(new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it was executed under its new name."""
        if self._spec is not None:
            module.__spec__ = self._spec


class _SplitModule(ModuleType):
    """A module or package that is no longer there: its names are looked up where they are now."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        return moved_name(self.__name__, name)


class _MovedFinder(MetaPathFinder):
    """A finder of old names of modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, or None for any other."""
        if fullname in MOVED or fullname in MOVED_NAMES:
            # Names that are looked up one by one may be those of modules, too.
            return ModuleSpec(fullname, _MovedLoader(), is_package=fullname in MOVED_NAMES)
        return None


def install() -> None:
    """Make old names importable."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
