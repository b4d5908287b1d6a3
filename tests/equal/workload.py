"""Random workloads of each row of the table in docs/equal-to-vllm.md, and what one step of an engine did."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.core.executor import CostModel
from kvarts.core.kv.transfer import LoadKv
from kvarts.cost.polynomial import LinearCost, PolynomialCost
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest

STEP_NS = 1_000_000
NEVER = 1 << 62
STOP = 99
"""The token that ends requests that stop."""
FULL: tuple[str, int | None] = ("full", None)


class Ask(msgspec.Struct):
    """A request: the step before which it arrives, its prompt, the tokens that it generates, vLLM's priority."""

    step: int
    prompt: list[int]
    output: list[int]
    priority: int = 0
    stops: bool = False
    """Whether its last token is one that ends it; else it ends as that is the last one it may generate."""
    gives_up: int = NEVER
    """The step before which its client gives it up, unless it has ended."""
    num_below: int = 0
    """The first pages of its tokens that a tier below the device has."""
    load_steps: int = 1
    """The steps from the beginning of a load to the plan that knows its end; one more with asynchronous scheduling."""
    drafts: list[tuple[int, int]] = []
    """After each of its tokens: the tokens drafted next, and how many of them are right."""
    num_good: int = NEVER
    """The pages of its first load that arrive; the tier loses the others."""


class TracedAsk:
    """A request of a trace, whose tokens are spelled out when it arrives. No other has the tokens that it generates."""

    priority = 0
    stops = False
    gives_up = num_good = NEVER

    def __init__(self, trace: Trace, row: TraceRequest, index: int) -> None:
        self.step = NEVER
        self.trace = trace
        self.row = row
        self.output = Repeated(10**9 + index, row.num_output_tokens)

    @property
    def prompt(self) -> list[int]:
        """The ids of its prompt's tokens."""
        content = self.trace.content(self.row, page_size=1, owner=0)
        return content.tokens(0, self.row.num_prompt_tokens).tolist()


class Repeated:
    """A token, so many times."""

    def __init__(self, token: int, count: int) -> None:
        self.token = token
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        return self.token


class Workload(msgspec.Struct):
    """Requests in order of arrival, and the engine that they meet. `groups`: kinds of KV groups, with their span."""

    page_size: int
    num_pages: int
    max_num_batched_tokens: int
    max_num_seqs: int
    asks: list[Any]
    groups: list[tuple[str, int | None]] = msgspec.field(default_factory=lambda: [FULL])
    policy: str = "fcfs"
    has_ties: bool = False
    """Whether requests of one step arrive at the same time; else each arrives after those before."""
    long_prefill_token_threshold: int = 0
    prefill_schedule_interval: int = 1
    watermark: float = 0.0
    is_async: bool = False
    retention: int | None = None
    """vLLM's prefix_cache_retention_interval, in tokens."""
    saves_inside: bool = False
    """Whether prefill saves states inside chunks."""
    load_kv: LoadKv | None = None
    """How requests wait for loads from a tier below the device; None without such a tier."""
    num_draft_slots: int = 0
    """The most tokens of a draft; 0 without drafts."""
    num_drafts: int = 0
    """The tokens of every draft in virtual time; 0 without such drafts."""
    is_eagle: bool = False
    """Whether these drafts are of layers with KV, which depends on the token after each (EAGLE, MTP)."""
    most_tokens: int = 0
    """The most tokens of a request, if there are such drafts."""
    finds_prefixes: bool = True
    num_ranks: int = 1
    report_every: int = 0
    """Steps between two reports of the ranks to the front end."""
    is_open: bool = False
    """Whether further requests may be appended."""
    version: str = "0.32"
    """Of vLLM, whose rules apply."""
    started: Any = None
    """The ReplayConfig of a start of vLLM, which decides the blocks, the groups and the budgets."""
    with_events: bool = True
    publishes: bool = False
    """Whether KV events are compared as they are published, with all their fields."""
    cost: CostModel = LinearCost(step_ms=STEP_NS / 1e6)

    @property
    def num_blocks(self) -> int:
        """The blocks of a device."""
        if self.started is not None:
            return int(self.started.start.num_blocks) - 1
        return self.num_pages * len(self.groups)

    @property
    def lookahead(self) -> int:
        """The tokens after a block that its hash covers."""
        return int(self.is_eagle and self.version != "0.32")

    @property
    def is_traced(self) -> bool:
        """Whether the requests are those of a trace."""
        return bool(self.asks) and isinstance(self.asks[0], TracedAsk)


class Step(msgspec.Struct):
    """What one step did. Requests are named by their place in the workload.

    `tokens`: computed by each request. `admitted`: the tokens that each admitted request hit. `num_free`: free blocks
    when the step was planned. `stored` and `removed`: hashes that became findable, sorted, and that were evicted, in
    order; with the group of each. With asynchronous scheduling, a step is a plan and what the step before it did to the
    memory when it ended, which is after the plan was made; `num_free` are the blocks that are free after both.
    `cached`: the cached tokens in the answers of requests that ended and were never preempted. `published`: the fields
    of the KV events that report the blocks in `stored`. `load`: what a rank reports after the step: requests that wait
    and that run, and the share of blocks in use. `placed`: the rank of each request that arrived; the other fields are
    then those of all ranks. `uncomputed` is not compared: the full pages, of this step and
    before, that vLLM made findable and that a preempted request has not computed.
    """

    tokens: dict[int, int] = {}
    admitted: dict[int, int] = {}
    preempted: list[int] = []
    num_free: int = 0
    ended: list[int] = []
    cached: dict[int, int] = {}
    stored: list[tuple[int, str]] = []
    removed: list[tuple[int, str]] = []
    published: dict[tuple[int, str], str] = {}
    placed: dict[int, int] = {}
    load: Any = None
    uncomputed: frozenset[tuple[int, str]] = frozenset()
    fails: bool = False
    """Whether vLLM's scheduler fails in this step, as it takes more blocks than it counted and than are free."""


def draw_workload(row: str, seed: int, version: str = "0.32") -> Workload:
    """Return a random workload of a row of the table: shared prefixes, small pools, requests that go on from others."""
    draw = random.Random(f"{row} {seed}")
    page_size = draw.choice([4, 8, 16])
    vocabulary = draw.choice([2, 3, 50])

    def some(most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(1, most))]

    stems = [some(24 * page_size) for _ in range(draw.randint(1, 5))]
    most_prompt, most_output = draw.choice([2, 8, 20]) * page_size, draw.choice([2, 12, 60])
    asks: list[Ask] = []
    step = 0
    for _ in range(draw.randint(5, 60)):
        step += draw.choice([0, 0, 0, 1, 4])
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(0, len(stem))] + some(most_prompt)
        if asks and draw.random() < 0.3:
            before = draw.choice(asks)
            known = before.prompt + before.output
            prompt = known[: draw.randint(1, len(known))] + some(page_size)
        asks.append(Ask(step, prompt[: 40 * page_size], some(most_output)))
    most = max(-(-(len(ask.prompt) + len(ask.output)) // page_size) for ask in asks)
    max_num_seqs = draw.choice([2, 4, 8, 32])
    workload = Workload(
        page_size=page_size,
        num_pages=most + draw.choice([0, 1, 3, 8, 20, 60, 200]),
        max_num_batched_tokens=draw.choice([32, 64, 128, 512]),
        max_num_seqs=max_num_seqs,
        asks=asks,
    )
    workload.version = version
    if (row.startswith("async") and row not in LOAD_ROWS) or row.endswith(":async"):
        workload.is_async = True
    if row in ("async-stop", "async-groups", "async-aborts"):
        for ask in asks:
            ask.stops = draw.random() < 0.7
            if ask.stops:
                ask.output[-1] = STOP
    if row == "uncached":
        workload.is_async = draw.random() < 0.5
    if row in ("aborts", "groups-aborts", "async-aborts", "uncached", *GIVEN_UP_LOAD_ROWS):
        for ask in asks:
            if draw.random() < 0.3:
                ask.gives_up = ask.step + draw.randint(0, 40)
    if row in TIED_ROWS:
        workload.has_ties = True
        workload.policy = "priority"
        for ask in asks:
            ask.priority = draw.choice([0, 0, 0, 1, 2])
            ask.step -= ask.step % draw.choice([1, 1, 20])
        asks.sort(key=lambda ask: ask.step)
    has_groups = row in (
        "cadence-groups",
        "ties-groups",
        "groups",
        "groups-aborts",
        "published",
        "limited",
        "async-groups",
        "async-aborts",
    )
    if (has_groups and not workload.has_ties and row not in CADENCE_ROWS) or row in (
        "aborts",
        "uncached",
        "priority",
        "async-priority",
        "async-limited",
    ):
        workload.policy = "priority"
        for ask in asks:
            ask.priority = draw.randrange(3)
    if row in ("long-prefill", "limited", "async-limited"):
        workload.long_prefill_token_threshold = draw.choice([1, 2, page_size, 3 * page_size + 1, 8 * page_size])
    if row in CADENCE_ROWS:
        workload.prefill_schedule_interval = draw.choice([2, 3, 5, 12])
        if draw.random() < 0.2:
            workload.long_prefill_token_threshold = 3 * page_size + 1
    if row in ("watermark", "limited", "async-limited"):
        workload.watermark = draw.choice([0.01, 0.05, 0.2, 0.5])
    if row in ("drafts", "group-drafts"):
        draw_drafts(workload, draw)
    if row in LOAD_ROWS:
        draw_loads(workload, row, draw)
    workload.publishes = row == "published"
    if row == "uncached":
        workload.finds_prefixes = workload.with_events = False
        states: list[tuple[str, int | None]] = [("state", None)] * draw.randint(0, 2)
        workload.groups = [FULL, *states]
        if draw.random() < 0.5:
            workload.groups += [("window", draw.randint(2, 8 * page_size)), ("chunk", page_size * draw.randint(1, 6))]
    if row == "ranks":
        workload.num_ranks = draw.randint(2, 4)
        workload.report_every = draw.choice([1, 5, 20, 100])
    if has_groups or row in GROUP_LOAD_ROWS or row == "group-drafts":
        windows = [("window", draw.randint(2, 8 * page_size)) for _ in range(draw.randint(0, 3))]
        chunks = [("chunk", page_size * draw.randint(1, 6)) for _ in range(draw.randint(1, 3))]
        workload.groups = [FULL, *windows, *chunks]
    elif row.startswith("states"):
        add_states(workload, row, draw)
    elif row in FORESEEN_ROWS:
        draw_foreseen(workload, row, draw)
    elif row in RETENTION_ROWS:
        add_retention(workload, row, draw)
    elif row in RETAINED_LOAD_ROWS:
        draw_loads(workload, row, draw)
        add_retention(workload, row, draw)
        workload.is_async = draw.random() < 0.5
    elif row in SHIPPED_ROWS:
        start_shipped(workload, row, draw)
    elif row in ("window", "chunk", "async-window", "async-chunk"):
        kind, span = row.removeprefix("async-"), page_size * draw.randint(1, 6)
        if kind == "window":
            span = draw.randint(2, 8 * page_size)
        workload.groups = [FULL, (kind, span)]
    return workload


def draw_drafts(workload: Workload, draw: random.Random) -> None:
    """Draft tokens for every request, of which none, some or all are right, within its limit of tokens."""
    slots = workload.num_draft_slots = draw.choice([1, 2, 4, 7])
    least = workload.max_num_seqs * (1 + slots)
    workload.max_num_batched_tokens = max(least, workload.max_num_batched_tokens)
    is_right = draw.choice([0.1, 0.5, 0.9])
    for ask in workload.asks:
        ask.output = [draw.randrange(2, 50) for _ in range(draw.randint(1, 80))]
        ask.drafts = []
        for place in range(len(ask.output)):
            num_drafted = min(draw.choice([0, slots, draw.randint(0, slots)]), len(ask.output) - place - 2)
            num_right = 0
            while num_right < num_drafted and draw.random() < is_right:
                num_right += 1
            ask.drafts.append((max(0, num_drafted), num_right))
    size = workload.page_size
    most = max(-(-(len(ask.prompt) + len(ask.output)) // size) for ask in workload.asks)
    workload.num_pages = most + draw.choice([1, 3, 8, 20, 60, 200])


def draw_foreseen(workload: Workload, row: str, draw: random.Random) -> None:
    """Draft as many tokens for every request in every step, in virtual time."""
    _, method, kinds, *others = row.split(":")
    draw_drafts(workload, draw)
    workload.num_drafts, workload.num_draft_slots = workload.num_draft_slots, 0
    if "states" in kinds:
        workload.num_drafts = min(workload.num_drafts, workload.page_size - 1)  # blocks of states are long
    workload.is_eagle = method == "eagle"
    for ask in workload.asks:
        ask.drafts = [(0, min(right + draw.choice([0, 0, 1]), workload.num_drafts)) for _, right in ask.drafts]
    size = workload.page_size
    workload.most_tokens = max(len(ask.prompt) + len(ask.output) for ask in workload.asks) + draw.choice([0, 1, 3, 50])
    workload.num_pages = -(-workload.most_tokens // size) + draw.choice([1, 3, 8, 20, 60, 200])
    if kinds != "full":
        add_retention(workload, f"retention:{draw.choice(['0', 'none', 'n'])}:{kinds}", draw)
    workload.long_prefill_token_threshold = 0
    if draw.random() < 0.2:
        workload.long_prefill_token_threshold = draw.choice([1 + workload.num_drafts, 2 * size + 9, 8 * size + 8])
    workload.watermark = draw.choice([0.0, 0.0, 0.0, 0.05])
    if "cadence" in others:
        workload.prefill_schedule_interval = draw.choice([2, 3, 5, 12])
    if "states" in kinds:
        workload.num_pages += workload.num_drafts + 3  # a request holds a state for each drafted token


def draw_loads(workload: Workload, row: str, draw: random.Random) -> None:
    """Let a tier have pages of most requests. In a row with failures, half of the loads bring fewer."""
    workload.load_kv = "async" if "async" in row.removesuffix(":async") or row == "failed-loads" else "sync"
    draw_below(workload, draw)
    for ask in workload.asks:
        if row == "failed-loads" and draw.random() < 0.5:
            ask.num_good = draw.choice([0, 0, 1, 2, 5])
    if workload.load_kv == "async" and row != "failed-loads":
        workload.watermark = draw.choice([0.0, 0.0, 0.05])
        workload.long_prefill_token_threshold = draw.choice([0, 0, 8 * workload.page_size])


def draw_below(workload: Workload, draw: random.Random) -> None:
    """Let a tier have pages of most requests, and draw the steps that loads take."""
    most_steps = draw.choice([1, 3, 12, 60])
    for ask in workload.asks:
        num_pages = (len(ask.prompt) + len(ask.output)) // workload.page_size
        ask.num_below = draw.choice([0, draw.randint(0, num_pages), num_pages])
        ask.load_steps = draw.randint(1, most_steps)


def add_states(workload: Workload, row: str, draw: random.Random) -> None:
    """Make `workload` one of a row with states in pages: in half of them windows, chunks, and three priorities."""
    kind = "aligned" if row.startswith("states-align") else "states"
    page_size = workload.page_size
    states: list[tuple[str, int | None]] = [(kind, None)] * draw.randint(1, 2)
    workload.groups = [FULL, *states]
    if draw.random() < 0.5:
        if row not in STATE_LOAD_ROWS:
            workload.policy = "priority"
            for ask in workload.asks:
                ask.priority = draw.randrange(3)
        workload.groups += [("window", draw.randint(2, 8 * page_size)) for _ in range(draw.randint(0, 2))]
        workload.groups += [("chunk", page_size * draw.randint(1, 6)) for _ in range(draw.randint(0, 1))]
    if draw.random() < 0.2:
        workload.long_prefill_token_threshold = draw.choice([page_size, 3 * page_size + 1, 8 * page_size])
    workload.is_async = row in ("states-all-async", "states-align-async") or row.endswith(":async")


def add_retention(workload: Workload, row: str, draw: random.Random) -> None:
    """Make `workload` one of a row with retention: groups in the orders that models have, some of them alike."""
    _, interval, kinds, *_ = row.split(":")
    size = workload.page_size
    windows = [("window", draw.randint(2, 8 * size))] * draw.randint(1, 3)
    if draw.random() < 0.3:
        windows.append(("window", draw.randint(2, 8 * size)))
    chunks = [("chunk", size * draw.randint(1, 6))] * draw.randint(1, 2)
    less: dict[str, list[tuple[str, int | None]]] = {
        "windows": [*windows],
        "chunks": [*chunks, *windows[: draw.randint(0, 1)]],
        "states": [("aligned", None)] * draw.randint(1, 3),
        "states-windows": [("aligned", None)] * draw.randint(1, 2) + [*windows],
    }
    workload.saves_inside = kinds.startswith("saved-")
    groups = less[kinds.removeprefix("saved-").removeprefix("latent-")]
    if draw.random() < 0.3:
        draw.shuffle(groups)
    place = draw.choice([0, len(groups), draw.randint(0, len(groups))])
    workload.groups = [*groups[:place], FULL, *groups[place:]]
    if kinds.startswith("latent-"):
        kind_of = {"full": "latent", "window": "latent-window"}
        workload.groups = [(kind_of[kind], span) for kind, span in workload.groups]
    if interval == "0":
        workload.retention = 0
    elif interval == "n" and any(kind != "chunk" for kind, _ in groups):
        workload.retention = size * draw.choice([1, 2, 3, 4, 8, 24])
    if draw.random() < 0.2:
        workload.long_prefill_token_threshold = draw.choice([size, 3 * size + 1, 8 * size])
    if draw.random() < 0.2:
        workload.watermark = draw.choice([0.01, 0.05, 0.2])


def start_shipped(workload: Workload, row: str, draw: random.Random) -> None:
    """Make `workload` one of a model on a device as a version of vLLM starts it, in a memory that is small for it."""
    from kvarts.sim.config import ReplayConfig

    _, model, *others, version = row.split(":")
    loads, method = others == ["loads"], "".join(others).removesuffix("loads")
    given: dict[str, Any] = {"engine": f"vllm=={version}", "tensor_parallel": SHIPPED[model]}
    if method:
        draw_drafts(workload, draw)
        num_drafts = workload.num_drafts = min(3, workload.num_draft_slots)
        workload.num_draft_slots, workload.is_eagle = 0, method != "ngram"
        for ask in workload.asks:
            ask.output = ask.output[:40]
            ask.drafts = [(0, min(right + draw.choice([0, 0, 1]), num_drafts)) for _, right in ask.drafts]
        given |= {"speculative_tokens": num_drafts, "acceptance": ",".join(["0.5"] * num_drafts)}
        given["speculative_method"] = method
    scale = 1 if model in LONG_BLOCKS else draw.choice([1, 4])
    if model == DEEPSEEK_V4:
        scale = 4  # a hit is a multiple of 256 tokens
    num_alike = draw.choice([64, 100, 200])
    for ask in workload.asks:
        if model in LONG_BLOCKS:
            ask.prompt = [token for token in ask.prompt[:60] for _ in range(num_alike)][: draw.choice([NEVER, 3000])]
        ask.prompt *= scale
        ask.output = ask.output[:40]
    length = max(len(ask.prompt) + len(ask.output) for ask in workload.asks) + draw.choice([0, 1, 100])
    given |= {"max_model_len": length, "max_batched_tokens": draw.choice([None, None, 256, 2048])}
    given |= {"max_seqs": draw.choice([None, 8]), "async_scheduling": draw.choice([True, True, False])}
    if method:
        given["max_seqs"] = 8
        given["async_scheduling"] = given["async_scheduling"] and method != "ngram"
    if model in LONG_BLOCKS:
        given["max_seqs"] = draw.choice([4, 16])
    given = {name: value for name, value in given.items() if value is not None}
    for num_blocks in (*range(20, 400, 4), 1000, 4000):
        try:
            more = draw.choice([0, 1, 5, 30, 100])
            # kvarts refuses what could wait for ever for a further state
            more += 8 * (model in LONG_BLOCKS) * (1 + bool(method))
            started = ReplayConfig.for_device(model, "h100-80gb", pages=num_blocks + more, **given)
        except ConfigError as error:
            if "max seq len" not in str(error) and "exceeds" not in str(error):
                raise
            continue
        break
    workload.started, workload.is_async = started, started.async_scheduling
    workload.page_size = started.page_size
    workload.max_num_batched_tokens, workload.max_num_seqs = started.max_num_batched_tokens, started.max_num_seqs
    if started.groups:
        workload.groups = [(group.layer.kind, group.layer.span) for group in started.memory.groups]
        workload.publishes = started.memory.hit_pages > 1 and draw.random() < 0.5
    if method:
        workload.most_tokens = length
    if loads:
        workload.load_kv = draw.choice(["sync", "async"])
        draw_below(workload, draw)


LONG_BLOCKS = ("qwen3.5-27b", "nemotron-3-nano-30b-a3b")
"""Models whose blocks have hundreds of tokens."""
DEEPSEEK_V4 = "deepseek-ai/DeepSeek-V4-Flash"
SHIPPED = {
    "gpt-oss-20b": 1,
    "gemma-3-27b": 1,
    "gemma-4-31b": 1,
    DEEPSEEK_V4: 4,
    "llama-4-scout": 8,
    "deepseek-v3.1": 8,
    "qwen3.5-27b": 1,
    "nemotron-3-nano-30b-a3b": 1,
}
"""Models, and the devices that they are split over."""
SHIPPED_ROWS = (
    {
        f"shipped:{model}:{version}": f"{model} as vLLM {version} starts it on an H100"
        for version in ("0.32", "0.33")
        for model in SHIPPED
    }
    | {
        f"shipped:{model}:loads:{version}": f"{model} as vLLM {version} starts it on an H100, with loads of a connector"
        for version in ("0.32", "0.33")
        for model in ("gpt-oss-20b", "gemma-3-27b", *LONG_BLOCKS)
    }
    | {
        f"shipped:{model}:{method}:{version}": f"{model} as vLLM {version} starts it on an H100, drafts by {method}"
        for version, model, method in (
            ("0.32", "qwen3.5-27b", "mtp"),
            ("0.32", "qwen3.5-27b", "ngram"),
            ("0.32", "deepseek-v3.1", "mtp"),
            ("0.33", "qwen3.5-27b", "mtp"),
            ("0.33", "nemotron-3-nano-30b-a3b", "mtp"),
            ("0.33", "deepseek-v3.1", "mtp"),
            ("0.33", "gpt-oss-20b", "eagle3"),
            ("0.33", "gemma-4-31b", "mtp"),
            ("0.33", "gemma-4-31b", "ngram"),
            ("0.33", "gemma-3-27b", "eagle3"),
            ("0.33", DEEPSEEK_V4, "mtp"),
            ("0.33", "qwen3.5-27b", "ngram"),
            ("0.32", "gemma-4-31b", "ngram"),
        )
    }
)
RETENTION_ROWS = {
    f"retention:{interval}:{kinds}{suffix}": f"retention {interval}, {kinds.replace('-', ' and ')} next to a full "
    f"group{', asynchronous scheduling' if suffix else ''}"
    for interval in ("0", "none", "n")
    for kinds in (
        "windows",
        "chunks",
        "states",
        "states-windows",
        "saved-states",
        "saved-states-windows",
        "latent-windows",
    )
    for suffix in ("", ":async")
}
RETAINED_LOAD_ROWS = {
    f"retention:{interval}:{kinds}:{loads}-loads": f"retention {interval}, {kinds.replace('-', ' and ')} next to a "
    f"full group, {loads.replace('sync', 'synchronous')} loads of a connector, half with asynchronous scheduling"
    for interval in ("0", "n")
    for kinds in ("windows", "chunks", "states", "states-windows", "saved-states", "saved-states-windows")
    for loads in ("sync", "async")
}
GIVEN_UP_LOAD_ROWS = ("group-loads-aborts", "async-group-loads-aborts")
GROUP_LOAD_ROWS = (
    "group-loads",
    "group-loads:async",
    "async-group-loads",
    "async-group-loads:async",
    *GIVEN_UP_LOAD_ROWS,
)
STATE_LOAD_ROWS = (
    "states-all-loads",
    "states-align-loads",
    "states-all-async-loads",
    "states-align-async-loads",
    "states-align-loads:async",
    "states-align-async-loads:async",
)
LOAD_ROWS = (
    "loads",
    "loads:async",
    "async-loads",
    "async-loads:async",
    "failed-loads",
    "tied-loads",
    *GROUP_LOAD_ROWS,
    *STATE_LOAD_ROWS,
)
FORESEEN_ROWS = {
    f"foreseen:{method}:{kinds}{suffix}": f"drafts in virtual time, {method}, {kinds}"
    f"{', asynchronous scheduling' if suffix else ''}"
    for method in ("eagle", "ngram")
    for kinds in (
        "full",
        "windows",
        "latent-windows",
        "states",
        "states-windows",
        "saved-states",
        "saved-states-windows",
    )
    for suffix in ("", ":async")
} | {
    f"foreseen:{method}:{kinds}:cadence{suffix}": f"drafts in virtual time, {method}, {kinds}, prompts in one of some "
    f"steps{', asynchronous scheduling' if suffix else ''}"
    for method in ("eagle", "ngram")
    for kinds in ("full", "windows", "states")
    for suffix in ("", ":async")
}
"""Every decode has a draft. vLLM 0.32 does not find the last block of such a prompt again, in no group: only the first
kinds are compared with it. In 0.33, hashes cover the token after a block."""
CADENCE_ROWS = ("cadence", "cadence:async", "cadence-groups")
"""Rows of vLLM 0.33: 0.32 has the option for ranks alone."""
TIED_ROWS = ("ties", "ties:async", "ties-groups", "tied-loads")
ROWS = {
    "full": "one full group, first come, first served",
    "priority": "three priorities",
    "ties": "three priorities, requests that arrive at the same time, in vLLM's policy priority",
    "ties:async": "the same with asynchronous scheduling",
    "ties-groups": "the same as ties with several windows and chunks, everything kept",
    "tied-loads": "the same as ties with synchronous loads of a connector",
    "window": "a window next to a full group, everything kept",
    "chunk": "chunks next to a full group, everything kept",
    "groups": "several windows and chunks next to a full group, everything kept, three priorities",
    "published": "as before, KV events as they are published",
    "aborts": "three priorities, clients give up 3 of 10 requests",
    "groups-aborts": "several windows and chunks, three priorities, clients give up 3 of 10 requests",
    "uncached": "without a prefix cache: states, windows and chunks, three priorities, half with async scheduling, "
    "clients give up 3 of 10 requests",
    "ranks": "data-parallel ranks behind a front end",
    "long-prefill": "a threshold of long prefills",
    "watermark": "a watermark",
    "limited": "a threshold and a watermark, several windows and chunks, three priorities",
    "async": "asynchronous scheduling",
    "async-stop": "asynchronous scheduling, most requests end with a stop token",
    "async-priority": "asynchronous scheduling, three priorities",
    "async-window": "asynchronous scheduling, a window next to a full group, everything kept",
    "async-chunk": "asynchronous scheduling, chunks next to a full group, everything kept",
    "async-groups": "asynchronous scheduling, several windows and chunks, three priorities, most end with a stop token",
    "async-aborts": "asynchronous scheduling, several windows and chunks, three priorities, most end with a stop "
    "token, clients give up 3 of 10 requests",
    "async-limited": "asynchronous scheduling, a threshold and a watermark, three priorities",
    "drafts": "drafts of tokens, planned before prompts",
    "group-drafts": "the same, with several windows and chunks, everything kept",
    **FORESEEN_ROWS,
    "loads": "synchronous loads of a connector",
    "loads:async": "the same with asynchronous scheduling",
    "async-loads": "asynchronous loads of a connector, some with a watermark or a threshold",
    "async-loads:async": "the same with asynchronous scheduling",
    "failed-loads": "asynchronous loads of a connector, of which half bring fewer pages",
    "group-loads": "synchronous loads of a connector, with several windows and chunks, everything kept",
    "group-loads:async": "the same with asynchronous scheduling",
    "async-group-loads": "the same with asynchronous loads, some with a watermark or a threshold",
    "async-group-loads:async": "the same with asynchronous scheduling",
    "group-loads-aborts": "synchronous loads with several windows and chunks, clients give up 3 of 10 requests",
    "async-group-loads-aborts": "the same with asynchronous loads, some with a watermark or a threshold",
    "states-all": "states after all pages (mamba_cache_mode all), half with windows, chunks and three priorities",
    "states-align": "states at the ends of chunks (mamba_cache_mode align), half with windows, chunks and three "
    "priorities",
    "states-all-async": "the same as states-all with asynchronous scheduling",
    "states-align-async": "the same as states-align with asynchronous scheduling",
    "states-all-loads": "states after all pages, synchronous loads of a connector",
    "states-align-loads": "states at the ends of chunks, synchronous loads of a connector",
    "states-all-async-loads": "states after all pages, asynchronous loads of a connector, some with a watermark or a "
    "threshold",
    "states-align-async-loads": "states at the ends of chunks, asynchronous loads of a connector, the same",
    "states-align-loads:async": "states at the ends of chunks, synchronous loads, asynchronous scheduling",
    "states-align-async-loads:async": "states at the ends of chunks, asynchronous loads, asynchronous scheduling",
    "cadence": "prompts in one of some steps",
    "cadence:async": "the same with asynchronous scheduling",
    "cadence-groups": "the same as cadence with several windows and chunks, everything kept",
    **RETENTION_ROWS,
    **RETAINED_LOAD_ROWS,
    **SHIPPED_ROWS,
}


def traced(trace: Trace, num_pages: int) -> Workload:
    """Return a whole trace as a workload, with vLLM's default budgets and no KV events."""
    return Workload(
        page_size=16,
        num_pages=num_pages,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        asks=[TracedAsk(trace, row, index) for index, row in enumerate(trace)],
        with_events=False,
        cost=PolynomialCost(),
    )
