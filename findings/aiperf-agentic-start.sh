#!/usr/bin/env bash
# AIPerf's agentic replay draws neither the sessions nor the turns at which it enters them.
#
# Guess, worded afterwards: --random-seed chooses which sessions of a large corpus are replayed, and a start between 25
#   and 75 % enters a session of 20 turns at the 5th to the 15th.
# Seen: every seed replays the first sessions of the file, as many as there are lanes, so two numbers of lanes compare
#   two samples of sessions. The start is drawn over the time between the first request and the last: in sessions with
#   one long pause it is within that pause, and every lane goes on with the turn after it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export UV_SYSTEM_CERTS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uv
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" aiperf==0.13.0

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

from aiperf.common.enums import ConversationContextMode
from aiperf.common.models import ConversationMetadata, DatasetMetadata, TurnMetadata
from aiperf.dataset.dataset_samplers import SequentialSampler
from aiperf.dataset.loader.weka_trace import WekaTraceLoader
from aiperf.timing.trajectory_source import TrajectorySource

print("aiperf", version("aiperf"))
SESSIONS, LANES, TURNS, PAUSE_MS = 400, 8, 20, 3_600_000.0
# Ten turns a second apart, an hour of nothing, and ten more.
times = [1_000.0 * turn + (PAUSE_MS if turn >= 10 else 0.0) for turn in range(TURNS)]
strategy = WekaTraceLoader.get_preferred_sampling_strategy()
dataset = DatasetMetadata(
    conversations=[
        ConversationMetadata(
            conversation_id=f"session-{number:03}", turns=[TurnMetadata(timestamp_ms=time) for time in times]
        )
        for number in range(SESSIONS)
    ],
    sampling_strategy=strategy,
    default_context_mode=ConversationContextMode.DELTAS_WITH_RESPONSES,
)
print("sampling of such corpora:", strategy)
first = [f"session-{number:03}" for number in range(LANES)]
for seed in (1, 2, 42):
    source = TrajectorySource(
        dataset_metadata=dataset,
        dataset_sampler=SequentialSampler([each.conversation_id for each in dataset.conversations]),
        concurrency=LANES,
        random_seed=seed,
        start_min_ratio=0.25,
        start_max_ratio=0.75,
        cache_bust_enabled=True,
    )
    sessions = [lane.conversation_id for lane in source.trajectories]
    turns = [lane.start_turn_index for lane in source.trajectories]
    print(f"seed {seed}: {sessions[0]} to {sessions[-1]}, entered at turns {turns}")
    assert sessions == first, "the sessions depend on the seed"
    assert turns == [10] * LANES, "the turns do not follow from the time of the pause"
print("as seen")
PYTHON
