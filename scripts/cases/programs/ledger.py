"""Drive the page ledger and block keys of Python with random signals, and print all that they answer."""

from __future__ import annotations

import random
from uuid import UUID

from kvarts import load_mooncake
from kvarts.audit.ledger import PageLedger
from kvarts.audit.signals import FullBlock, LedgerError, PartialBlock
from kvarts.keys import BlockKeys


def drive(seed: int) -> None:
    """Print every event of a ledger, and every refusal."""
    rng = random.Random(seed)
    events: list[object] = []
    ledger = PageLedger(capacity=12, block_size=16, sink=events.append)
    for number in range(400):
        start = rng.randrange(6) * 10
        blocks = [FullBlock(start + depth) for depth in range(rng.randrange(1, 5))]
        tail = PartialBlock(UUID(int=rng.randrange(4)))
        signal = rng.choice(["use", "use", "deref", "destroy", "promote", "keep", "unkeep"])
        try:
            if signal == "use":
                print(number, ledger.use([*blocks, tail] if rng.random() < 0.3 else blocks))
            elif signal == "promote":
                ledger.promote(tail.uuid, FullBlock(start + 7), parent_hash=start)
            else:
                getattr(ledger, signal)(blocks)
        except (LedgerError, TypeError, ValueError) as error:
            print(number, signal, type(error).__name__, error)
        print(number, ledger.prefill_cost(blocks, 40), list(ledger.active), list(ledger.inactive))
    for event in events:
        print(event)


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
