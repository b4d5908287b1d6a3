"""Drive the ledger and block keys of Python with random calls, and print all that they answer."""

from __future__ import annotations

import random

from kvarts.core.keys import BlockKeys
from kvarts.proof.audit.ledger import Keep, Ledger, LedgerError, LedgerGroup, LedgerPart
from kvarts.sim.traffic.mooncake import load_mooncake


def drive(seed: int) -> None:
    """Print everything that happens to parts, and every refusal."""
    rng = random.Random(seed)
    ledger = Ledger((LedgerGroup("full", 1), LedgerGroup("window", 2, 32)), 12, keeps_all=bool(seed % 2))
    held: list[LedgerPart] = []
    keeps: list[Keep] = []
    for number in range(400):
        call = rng.choice(["take", "take", "publish", "publish", "hold", "release", "release", "keep", "end_keep"])
        name = bytes([rng.randrange(6)])
        try:
            if call == "take":
                part = ledger.take(rng.randrange(2))
                print(number, part is not None)
                held += [] if part is None else [part]
            elif call == "publish" and held:
                print(number, ledger.publish(rng.choice(held), name))
            elif call == "hold":
                part = ledger.find(rng.randrange(2), name)
                if part is not None:
                    ledger.hold(part)
                    held.append(part)
            elif call == "release" and held:
                ledger.release(held.pop(rng.randrange(len(held))))
            elif call == "keep":
                kept = ledger.keep(rng.randrange(2), name)
                keeps += [] if kept is None else [kept]
            elif call == "end_keep" and keeps:
                ledger.end_keep(keeps.pop(rng.randrange(len(keeps))))
        except LedgerError as error:
            print(number, call, type(error).__name__, error)
        print(number, ledger.num_used, ledger.num_cached, ledger.counts())
        while ledger.happened:
            print(ledger.happened.popleft())


def main() -> None:
    """Print everything."""
    for seed in range(3):
        drive(seed)
    for request in list(load_mooncake("small.jsonl"))[:5]:
        content = load_mooncake("small.jsonl").content(request, page_size=16, owner=0)
        for algorithm in ("sha256", "sha256_cbor"):
            keys = BlockKeys(content, algorithm="sha256" if algorithm == "sha256" else "sha256_cbor")
            print(algorithm, len(keys), [key.hex() for key in keys][:40])


if __name__ == "__main__":
    main()
