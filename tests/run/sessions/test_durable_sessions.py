"""Sessions that outlive their process: what was acknowledged is there, and goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvarts.base.errors import KvartsError, OutputError
from kvarts.run.sessions.history import Histories
from kvarts.run.sessions.opening import open_sessions
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import SessionGoneError, SessionSettings, StoredSession, Token, Usage

from builders.full_disk import full_disk
from builders.sessions import OWNER, greedy, mock_says, say


def reopen(directory: Path, said: list[str] | None = None, **settings: Any) -> Sessions:
    say_line = (lambda _: None) if said is None else said.append
    return open_sessions(mock=True, speedup=1000.0, kv_memory="256MiB", state_dir=directory, say=say_line, **settings)


def test_sessions_come_back_with_their_kv(tmp_path: Path) -> None:
    async def before() -> tuple[str, str, list[int], int]:
        sessions = reopen(tmp_path)
        session = await sessions.create(OWNER, SessionSettings(sink=2, window=40, label="first"))
        gone = await sessions.create(OWNER)
        history = list(range(300))
        history += await say(sessions, session, history, 20)
        await sessions.append(OWNER, gone, [1, 2, 3])
        await sessions.close(OWNER, gone)
        computed = (await sessions.info(OWNER, session)).num_computed_tokens
        await sessions.shut_down()
        return session, gone, history, computed

    async def after(session: str, gone: str, history: list[int], computed: int) -> None:
        sessions = reopen(tmp_path)
        info = await sessions.info(OWNER, session)
        assert (info.restored, info.history_length, info.num_retained) == ("kv", len(history), 42)
        assert info.settings.label == "first"
        assert info.num_computed_tokens == computed
        assert await say(sessions, session, [], 5) == mock_says(history, 5)
        info = await sessions.info(OWNER, session)
        # The last token again, four that were sampled, and the fifth, for the next turn.
        assert info.num_computed_tokens == computed + 6
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        with pytest.raises(KvartsError, match="was closed"):
            await sessions.info(OWNER, gone)
        await sessions.shut_down()

    asyncio.run(after(*asyncio.run(before())))


@pytest.mark.parametrize("damage", ["gone", "torn", "foreign"])
def test_kv_that_does_not_fit_is_named_and_computed_again(tmp_path: Path, damage: str) -> None:
    async def before() -> tuple[str, list[int]]:
        sessions = reopen(tmp_path)
        session = await sessions.create(OWNER, SessionSettings(sink=2, window=40))
        history = list(range(100))
        history += await say(sessions, session, history, 5)
        await sessions.shut_down()
        return session, history

    session, history = asyncio.run(before())
    (file,) = [path for path in (tmp_path / "kv").iterdir() if session in path.name]
    if damage == "gone":
        file.unlink()
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:-100])
    said: list[str] = []

    async def after() -> None:
        sessions = reopen(tmp_path, said, page_size=8 if damage == "foreign" else 16)
        info = await sessions.info(OWNER, session)
        assert (info.restored, info.num_retained, info.history_length) == ("tokens", 0, len(history))
        assert await say(sessions, session, [], 4) == mock_says(history, 4)
        assert (await sessions.info(OWNER, session)).num_retained == 42
        await sessions.shut_down()

    asyncio.run(after())
    assert [str(file) in line for line in said] == ([] if damage == "gone" else [True])


def test_forks_and_rollbacks_come_back(tmp_path: Path) -> None:
    async def before() -> tuple[str, str]:
        sessions = reopen(tmp_path)
        session = await sessions.create(OWNER, SessionSettings(sink=2, window=40))
        await say(sessions, session, list(range(20)), 5)
        fork = await sessions.fork(OWNER, session)
        await sessions.rollback(OWNER, session, 10)
        await sessions.append(OWNER, session, [7, 7])
        await sessions.append(OWNER, fork, [8])
        await sessions.shut_down()
        return session, fork

    async def after(session: str, fork: str) -> None:
        sessions = reopen(tmp_path)
        first = list(range(20))
        assert await say(sessions, session, [], 4) == mock_says([*range(10), 7, 7], 4)
        assert await say(sessions, fork, [], 4) == mock_says([*first, *mock_says(first, 5), 8], 4)
        await sessions.shut_down()

    asyncio.run(after(*asyncio.run(before())))


@pytest.mark.parametrize("at_capacity", ["refuse", "evict"])
def test_sessions_without_room_stay_on_disk(tmp_path: Path, at_capacity: str) -> None:
    async def fill() -> list[str]:
        sessions = reopen(tmp_path)
        made = [await sessions.create(OWNER, SessionSettings(sink=2, window=40)) for _ in range(3)]
        for number, session in enumerate(made):
            await sessions.append(OWNER, session, [number] * 9)
        await sessions.shut_down()
        return made

    async def look(**settings: Any) -> tuple[list[str], list[str]]:
        said: list[str] = []
        sessions = reopen(tmp_path, said, **settings)
        found = [info.session_id for info in await sessions.list(OWNER)]
        await sessions.shut_down()
        return found, said

    made = asyncio.run(fill())
    found, said = asyncio.run(look(max_sessions=2, at_capacity=at_capacity))
    assert found == made[:2]
    assert len(said) == 1
    assert said[0].startswith(f"session {made[2]} stays on disk")
    assert asyncio.run(look()) == (made, [])


def test_no_kv_is_left_of_sessions_that_were_closed(tmp_path: Path) -> None:
    """Also where it was being written when the session went."""

    async def talk() -> None:
        sessions = reopen(tmp_path)
        made = [await sessions.create(OWNER, SessionSettings(sink=2, window=40)) for _ in range(20)]

        async def turn(session: str) -> None:
            await say(sessions, session, list(range(50)), 2)
            await sessions.close(OWNER, session)

        await asyncio.gather(*map(turn, made))
        await sessions.shut_down()

    asyncio.run(talk())
    assert list((tmp_path / "kv").iterdir()) == []


def test_tombstones_do_not_stay_for_ever(tmp_path: Path) -> None:
    async def close_one() -> str:
        sessions = reopen(tmp_path)
        session = await sessions.create(OWNER)
        await sessions.close(OWNER, session)
        await sessions.shut_down()
        return session

    asyncio.run(close_one())
    with Histories(tmp_path) as histories:
        old = StoredSession(
            session_id="0" * 32, owner=OWNER, settings=SessionSettings(), created_s=0.0, usage=Usage(last_used_s=0.0)
        )
        histories.create(old).result()
        histories.end(old.session_id, "closed", 1.0).result()
        assert len(histories.tombstones()) == 2
    new = asyncio.run(close_one())
    with Histories(tmp_path) as histories:
        known = {tombstone.session_id for tombstone in histories.tombstones()}
    assert len(known) == 2
    assert new in known
    assert old.session_id not in known


async def said_until_it_fails(sessions: Sessions, session: str, num_tokens: int) -> list[int]:
    """Generate until that fails, or ends; return the tokens that arrived."""
    arrived: list[int] = []
    with suppress(OutputError):
        async for update in sessions.generate(OWNER, session, greedy(num_tokens)):
            arrived += [update.token_id] if isinstance(update, Token) else []
    return arrived


async def appended(sessions: Sessions, session: str, tokens: list[int]) -> list[int]:
    """Append tokens to a history; return those that were acknowledged."""
    try:
        await sessions.append(OWNER, session, tokens)
    except OutputError:
        return []
    return tokens


@pytest.mark.parametrize("room_bytes", [0, 4096, 50_000], ids=["none", "a page", "some"])
def test_a_session_goes_on_when_a_full_disk_has_room_again(tmp_path: Path, room_bytes: int) -> None:
    """What could not be written is not acknowledged, and is not in the history either: the client never got it."""

    async def fill() -> dict[str, list[int]]:
        sessions = reopen(tmp_path)
        histories = {}
        for each in [
            await sessions.create(OWNER, SessionSettings(sink=2, window=40)),
            await sessions.create(OWNER, SessionSettings(sink=2, window=40)),
            await sessions.create(OWNER),
        ]:
            await sessions.append(OWNER, each, range(30))
            histories[each] = [*range(30)]
        size_bytes = max(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
        with full_disk(size_bytes + room_bytes if room_bytes else 1):
            for each, history in histories.items():
                arrived = await said_until_it_fails(sessions, each, 20_000)
                assert arrived == mock_says(history, len(arrived))
                history.extend(arrived)
                assert (await sessions.info(OWNER, each)).history_length == len(history)
                # Where the long answer failed with some room left, a short write may still fit.
                late = await appended(sessions, each, [1, 2, 3])
                history.extend(late)
                short = await said_until_it_fails(sessions, each, 5)
                assert short == mock_says(history, len(short))
                history.extend(short)
                assert not (late or short) or room_bytes == 50_000
                assert (await sessions.info(OWNER, each)).history_length == len(history)
        session, other, unbounded = histories
        for each in (session, unbounded):
            history = histories[each]
            history += [4, 5]
            said = await say(sessions, each, [4, 5], 6)
            assert said == mock_says(history, 6)
            history += said
            assert (await sessions.info(OWNER, each)).inv1_violations == 0
        fork = await sessions.fork(OWNER, other)
        histories[fork] = [*histories[other]]
        await sessions.shut_down()
        return histories

    async def after(histories: dict[str, list[int]]) -> None:
        sessions = reopen(tmp_path)
        for each, history in histories.items():
            assert (await sessions.info(OWNER, each)).history_length == len(history)
            assert await say(sessions, each, [], 4) == mock_says(history, 4)
        await sessions.shut_down()

    asyncio.run(after(asyncio.run(fill())))


SERVER = """
import asyncio, sys
from pathlib import Path
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.opening import open_sessions
from kvarts.run.sessions.values import SessionSettings, Token

async def serve():
    model = sys.argv[2]
    of_model = {"model": model, "page_size": 4, "kv_groups": sys.argv[3], "kv_dtype": sys.argv[4]}
    served = of_model if model else {"mock": True, "speedup": 1000.0}
    sessions = open_sessions(kv_memory="256MiB", state_dir=Path(sys.argv[1]), **served)
    known = await sessions.list("o")
    session = known[0].session_id if known else await sessions.create("o", SessionSettings(sink=2, window=30))
    print("length", (await sessions.info("o", session)).history_length, flush=True)
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        kind, number = line.split()
        if kind == "append":
            tokens = [int(number)] * 7
            print("appended", await sessions.append("o", session, tokens), flush=True)
        else:
            params = SamplingParams(max_tokens=int(number), ignore_eos=True)
            async for update in sessions.generate("o", session, params):
                if isinstance(update, Token):
                    print("token", update.token_id, flush=True)
            print("done 0", flush=True)

asyncio.run(serve())
"""


Says = Callable[[list[int], int], list[int]]


def kill_again_and_again(
    directory: Path,
    num_kills: int,
    seed: int,
    *,
    model: str = "",
    kv_groups: str = "off",
    kv_dtype: str = "auto",
    says: Says = mock_says,
    vocab_size: int = 1000,
) -> None:
    """Acknowledged is what was printed. The history may have more: of the operation that was under way.

    `says`: what comes after a history.
    """
    random = Random(seed)
    history: list[int] = []
    pending: list[int] = []
    """Tokens of the append under way, which is there as a whole or not at all."""
    generating = False
    for _ in range(num_kills):
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(directory), model, kv_groups, kv_dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert server.stdin is not None
        assert server.stdout is not None
        length = int(server.stdout.readline().split()[1])
        if pending and length == len(history) + len(pending):
            history += pending
        elif generating:
            assert length >= len(history), "an acknowledged token is lost"
            history += says(history, length - len(history))
        assert length == len(history), "a token is lost or doubled"
        pending, generating = [], False
        ends_s = time.monotonic() + random.random() * 0.3
        killed = False
        while not killed:
            if not history or random.random() < 0.5:
                token = random.randrange(vocab_size)
                pending = [token] * 7
                server.stdin.write(f"append {token}\n")
            else:
                generating = True
                server.stdin.write("generate 9\n")
            while True:
                if time.monotonic() > ends_s:
                    server.send_signal(signal.SIGKILL)
                    killed = True
                line = server.stdout.readline()
                if not line.endswith("\n"):
                    killed = True
                    break
                kind, number = line.split()
                if kind == "token":
                    assert int(number) == says(history, 1)[0], "the continuation is another"
                    history.append(int(number))
                elif kind == "appended":
                    history += pending
                    assert int(number) == len(history)
                    pending = []
                    break
                else:
                    generating = False
                    break
        server.stdin.close()
        server.stdout.close()
        server.wait()


@pytest.mark.slow
def test_killed_at_any_moment_nothing_that_was_said_is_lost(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 6, seed=1)


@pytest.mark.long
def test_killed_three_hundred_times(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 300, seed=2)


@pytest.mark.parametrize(
    ("family", "kv_groups", "num_kills"),
    [
        pytest.param("qwen3", "off", 2, marks=pytest.mark.long),
        pytest.param("qwen3", "off", 30, marks=pytest.mark.long),
        pytest.param("gemma3", "all", 12, marks=pytest.mark.long),
    ],
)
def test_a_real_model_is_killed(
    family: str, kv_groups: str, num_kills: int, tmp_path: Path, models: Callable[[str], tuple[Any, Any]]
) -> None:
    """Each token is that of a forward pass over the whole history, whatever came from a checkpoint."""
    pytest.importorskip("torch", reason="real models need kvarts[torch]")
    pytest.importorskip("transformers", reason="real models need kvarts[torch]")
    from kvarts.run.torch.tiny import write_tiny

    from oracles.masked_forward import masked_greedy

    _, reference = models(family)
    write_tiny(family, tmp_path / "model")

    def says(history: list[int], num_tokens: int) -> list[int]:
        return masked_greedy(reference, history, num_tokens, sink=2, window=30)

    state = tmp_path / "state"
    model = str(tmp_path / "model")
    kill_again_and_again(state, num_kills, seed=3, model=model, kv_groups=kv_groups, says=says, vocab_size=257)


def test_idleness_goes_on_while_no_server_runs(tmp_path: Path) -> None:
    """A session whose time has passed meanwhile is not served again; one with time left is."""

    async def before() -> list[str]:
        sessions = reopen(tmp_path)
        made = [await sessions.create(OWNER, SessionSettings(ttl_s=ttl_s)) for ttl_s in (0.2, 600.0)]
        for session in made:
            await say(sessions, session, [1, 2, 3], 2)
        await sessions.shut_down()
        return made

    async def after(short: str, long: str) -> None:
        sessions = reopen(tmp_path)
        with pytest.raises(SessionGoneError, match="expired"):  # although no reaper has run
            await sessions.append(OWNER, short, [1])
        assert await sessions.reap() == 0
        assert [info.session_id for info in await sessions.list(OWNER)] == [long]
        with pytest.raises(SessionGoneError, match="expired"):
            await sessions.info(OWNER, short)
        await sessions.shut_down()

    made = asyncio.run(before())
    time.sleep(0.3)
    asyncio.run(after(*made))


def test_a_real_model_goes_on_from_its_checkpoint(tmp_path: Path, models: Callable[[str], tuple[Any, Any]]) -> None:
    """The KV is that of the file: the same tokens, and none of the history is computed again."""
    pytest.importorskip("torch", reason="real models need kvarts[torch]")
    pytest.importorskip("transformers", reason="real models need kvarts[torch]")
    from kvarts.run.torch.tiny import write_tiny

    from oracles.masked_forward import masked_greedy

    _, reference = models("qwen3")
    write_tiny("qwen3", tmp_path / "model")
    history = [Random(4).randrange(257) for _ in range(90)]
    expected = masked_greedy(reference, history, 16, sink=3, window=20)

    def opened() -> Sessions:
        return open_sessions(
            model=tmp_path / "model",
            kv_memory="4MiB",
            page_size=4,
            defaults=SessionSettings(sink=3, window=20),
            state_dir=tmp_path / "state",
        )

    async def before() -> str:
        sessions = opened()
        session = await sessions.create(OWNER)
        assert await say(sessions, session, history, 8) == expected[:8]
        await sessions.shut_down()
        return session

    async def after(session: str) -> None:
        sessions = opened()
        info = await sessions.info(OWNER, session)
        assert info.restored == "kv"
        said = [u.token_id async for u in sessions.generate(OWNER, session, greedy(8)) if isinstance(u, Token)]
        assert said == expected[8:]
        assert (await sessions.info(OWNER, session)).num_computed_tokens == info.num_computed_tokens + 9
        await sessions.shut_down()

    asyncio.run(after(asyncio.run(before())))


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_real_model_with_quantized_kv_is_killed(kv_dtype: str, tmp_path: Path) -> None:
    """Each token is that of a session that nobody disturbs, with its KV in the same format and from the same history.

    KV is quantized page by page as it is computed: after a restart it is that of a checkpoint, or computed again.
    """
    pytest.importorskip("torch", reason="real models need kvarts[torch]")
    pytest.importorskip("transformers", reason="real models need kvarts[torch]")
    from kvarts.run.torch.tiny import write_tiny

    model = str(tmp_path / "model")
    write_tiny("qwen3", tmp_path / "model")
    undisturbed = Undisturbed(model, kv_dtype)
    kill_again_and_again(
        tmp_path / "state", 12, seed=4, model=model, kv_dtype=kv_dtype, says=undisturbed.says, vocab_size=257
    )


class Undisturbed:
    """Says what a session with sink 2 and window 30 says to a history, which it is given at once."""

    def __init__(self, model: str, kv_dtype: str) -> None:
        self._open = partial(open_sessions, model=model, kv_memory="64MiB", page_size=4, kv_dtype=kv_dtype)

    def says(self, history: list[int], num_tokens: int) -> list[int]:
        async def run() -> list[int]:
            sessions = self._open()
            session = await sessions.create(OWNER, SessionSettings(sink=2, window=30))
            await sessions.append(OWNER, session, history)
            said = [
                update.token_id
                async for update in sessions.generate(OWNER, session, greedy(num_tokens))
                if isinstance(update, Token)
            ]
            await sessions.shut_down()
            return said

        return asyncio.run(run()) if num_tokens else []
