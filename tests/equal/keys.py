"""Keys of blocks: kvarts' next to those of vLLM's own requests, for each hash, salt, adapter, image and lookahead.

    PYTHONPATH=src:tests VLLM_VENV/bin/python -m equal.keys --requests 2000
    PYTHONPATH=src:tests VLLM_VENV/bin/python -m equal.keys --write tests/core/vllm_keys.json

Runs with vLLM 0.32 as installed, or with 0.33 where its Python files precede it in PYTHONPATH; `--write` needs 0.33,
which hashes tokens ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvarts.core.content import Content
from kvarts.core.keys import Adapter, BlockKeys, Medium, root_key, salt_of_adapter

__all__ = ["ALGORITHMS", "SEED", "Drawn", "draw", "keys_of"]

SEED = "65"
"""PYTHONHASHSEED: without it, vLLM draws the root key of xxhash at random in each process."""
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class Drawn(msgspec.Struct, frozen=True):
    """A request. `adapter`: its name and path. `media`: a hash, the first token, and the number of tokens of each."""

    algorithm: str
    page_size: int
    tokens: list[int]
    salt: str | None
    adapter: tuple[str, str] | None
    media: list[tuple[str, int, int]]
    lookahead: int


def draw(seed: int, *, looks_ahead: bool) -> Drawn:
    """Return a random request."""
    rng = random.Random(seed)
    size = rng.choice((1, 4, 16))
    tokens = [rng.choice((0, 7, 151_643, 2**31, rng.randrange(200_000))) for _ in range(rng.randint(0, 6 * size + 3))]
    media, at = [], 0
    while rng.random() < 0.5 and at < len(tokens):
        start = at + rng.randint(0, 2 * size)
        length = rng.randint(1, 3 * size)
        if start + length > len(tokens):
            break
        media.append((rng.choice(("a" * 64, "b" * 64, "image", "x")), start, length))
        at = start + length
    return Drawn(
        algorithm=ALGORITHMS[seed % len(ALGORITHMS)],
        page_size=size,
        tokens=tokens,
        salt=rng.choice((None, "tenant-a", "ü")),
        adapter=rng.choice((None, ("sql", "/adapters/sql"), ("sql", ""), ("same", "same"))),
        media=media,
        lookahead=rng.choice((0, 0, 1, 3)) if looks_ahead else 0,
    )


def keys_of(drawn: Drawn) -> list[str]:
    """Return kvarts' keys in hexadecimal digits."""
    salt = drawn.salt if drawn.adapter is None else salt_of_adapter(Adapter(*drawn.adapter), drawn.salt)
    content = Content.from_tokens(drawn.tokens, page_size=drawn.page_size, owner=0, salt=salt)
    media = [Medium(*each) for each in drawn.media]
    algorithm: Any = drawn.algorithm
    root = root_key(algorithm, SEED)
    keys = BlockKeys(content, algorithm=algorithm, root=root, media=media, lookahead=drawn.lookahead)
    return [key.hex() for key in keys]


class Vllm:
    """vLLM's requests, which hash their blocks."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["PYTHONHASHSEED"] = SEED
        import inspect

        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.request import Request

        self.request, self.params, self.adapter = Request, SamplingParams(max_tokens=1), LoRARequest
        self.feature, self.range = MultiModalFeatureSpec, PlaceholderRange
        self.hash_of, self.utils = get_hash_fn_by_name, kv_cache_utils
        hasher = inspect.signature(kv_cache_utils.get_request_block_hasher)
        self.looks_ahead = "num_hash_lookahead_tokens" in hasher.parameters

    def root(self, algorithm: str) -> str:
        """Return the root key."""
        self.utils.init_none_hash(self.hash_of(algorithm))
        return str(self.utils.NONE_HASH.hex())

    def keys(self, drawn: Drawn) -> list[str]:
        """Return the keys of a request's blocks."""
        self.root(drawn.algorithm)
        more = (drawn.lookahead,) if self.looks_ahead else ()
        hasher = self.utils.get_request_block_hasher(drawn.page_size, self.hash_of(drawn.algorithm), *more)
        # Requests arrive as messages in vLLM's engine, so that equal strings are different objects there.
        features = [
            self.feature(
                data=None,
                modality="image",
                identifier=msgspec.msgpack.decode(msgspec.msgpack.encode(name)),
                mm_position=self.range(offset=start, length=length),
            )
            for name, start, length in drawn.media
        ]
        adapter = None
        if drawn.adapter is not None:
            name, path = msgspec.msgpack.decode(msgspec.msgpack.encode(list(drawn.adapter)))
            adapter = self.adapter(lora_name=name, lora_int_id=1, lora_path=path or "/")
            adapter.lora_path = path
        request = self.request(
            request_id="1",
            prompt_token_ids=drawn.tokens or [0],
            sampling_params=self.params,
            pooling_params=None,
            mm_features=features or None,
            lora_request=adapter,
            cache_salt=drawn.salt,
            block_hasher=hasher,
        )
        return [key.hex() for key in request.block_hashes]


def main() -> int:
    """Compare, or write vectors; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    vllm = Vllm()
    num_keys, num_differing, vectors = 0, 0, []
    known = ALGORITHMS if find_spec("xxhash") else ALGORITHMS[:2]
    for algorithm in known:
        num_differing += root_key(algorithm, SEED).hex() != vllm.root(algorithm)  # type: ignore[arg-type]
    for seed in range(options.seed, options.seed + options.requests):
        drawn = draw(seed, looks_ahead=vllm.looks_ahead)
        if not drawn.tokens or drawn.algorithm not in known:
            continue
        theirs, own = vllm.keys(drawn), keys_of(drawn)
        num_keys += len(theirs)
        vectors.append({**msgspec.to_builtins(drawn), "keys": theirs})
        if own != theirs:
            num_differing += 1
            if num_differing <= 3:
                print(f"seed {seed}: {drawn}\nvLLM   {theirs}\nkvarts {own}")
    if options.write is not None:
        assert vllm.looks_ahead and known == ALGORITHMS, "vectors are those of vLLM 0.33, with xxhash"
        roots = {algorithm: vllm.root(algorithm) for algorithm in ALGORITHMS}
        lines = ",\n".join(json.dumps(vector) for vector in vectors)
        options.write.write_text(f'{{"roots": {json.dumps(roots)},\n"requests": [\n{lines}\n]}}\n')
    version = "0.33" if vllm.looks_ahead else "0.32"
    print(f"vLLM {version}: {options.requests:,} requests with {num_keys:,} keys, {num_differing} differ")
    if known != ALGORITHMS:
        print("NOTE: xxhash is not installed, so that only sha256 was compared")
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
