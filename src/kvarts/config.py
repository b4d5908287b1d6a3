"""Configuration of one engine: the size of its KV memory and the limits of its steps.

It is an immutable value that is checked on construction, so callers of the library get the same errors as users of the
command line. TOML files and the command line use the short field names in `rename`.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from kvarts.limits import MOST_MS, MOST_PAGE_TOKENS, MOST_PAGES, check_number, check_whole
from kvarts.settings import SettingError, setting

__all__ = ["EngineConfig", "Profile", "Snapshots"]

Profile = Literal["default", "mocker"]
Snapshots = Literal["ends", "branches"]


class EngineConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={
        "num_pages": "pages",
        "max_num_batched_tokens": "max_batched_tokens",
        "max_num_seqs": "max_seqs",
    },
):
    """Size and limits of one engine.

    `num_pages`: pages of KV memory. `page_size`: tokens per page. `max_num_batched_tokens`: most tokens computed per
    step. `max_num_seqs`: most requests running at once. `max_itl_ms`: a bound on the expected duration of steps with
    decodes, see ItlBound in kvarts.sched.prefill; None for no bound. `profile`: `default`, or `mocker` for the rules of
    NVIDIA Dynamo's mocker in its vLLM mode: no priorities, generated tokens are never hit, and a request's cached
    tokens are the largest hit of any of its admissions. `long_prefill_token_threshold`: most tokens that one request
    computes per step while there are others; 0 for no limit. `watermark`: fraction of the memory, in [0, 1), that an
    admission leaves free while other requests run. Both are vLLM's. `snapshots`: where layers with a state leave
    snapshots: at the last page end of each prompt, or also where a prompt leaves another.

    Raises ConfigError for a value out of range.
    """

    num_pages: Annotated[
        int,
        setting(
            "Pages of KV memory of each replica.",
            metavar="N",
            default="32768; with --device, the pages that fit",
            replaces=("kv_memory",),
        ),
    ] = 32_768
    page_size: Annotated[int, setting("Tokens per page.", metavar="TOKENS")] = 16
    max_num_batched_tokens: Annotated[int, setting("Most tokens computed per step.", metavar="TOKENS")] = 8_192
    max_num_seqs: Annotated[int, setting("Most requests that run at once.", metavar="N")] = 256
    max_itl_ms: Annotated[
        float | None,
        setting("Longest step with decodes: chunks of prompts are cut to keep it, to a page at least.", metavar="MS"),
    ] = None
    profile: Annotated[Profile, setting("Rules of the scheduler: kvarts' own, or those of NVIDIA Dynamo's mocker.")] = (
        "default"
    )
    long_prefill_token_threshold: Annotated[
        int,
        setting("Tokens of one request a step may compute while there are others; 0: no limit.", metavar="TOKENS"),
    ] = 0
    watermark: Annotated[
        float, setting("Fraction of the memory that stays free when a request joins others.", metavar="FRACTION")
    ] = 0.0
    snapshots: Annotated[
        Snapshots,
        setting(
            "Where layers with a state leave snapshots, from which others continue. ends: at the last page end of each "
            "prompt; branches: also where a prompt leaves another one that is cached."
        ),
    ] = "ends"

    def __post_init__(self) -> None:
        check_whole(self.num_pages, "num_pages", most=MOST_PAGES)
        check_whole(self.page_size, "page_size", most=MOST_PAGE_TOKENS)
        check_whole(self.max_num_batched_tokens, "max_num_batched_tokens")
        check_whole(self.max_num_seqs, "max_num_seqs")
        if self.max_itl_ms is not None:
            check_number(self.max_itl_ms, "max_itl_ms", above=True, most=MOST_MS)
        if self.profile not in ("default", "mocker"):
            raise SettingError(f"must be 'default' or 'mocker', got {self.profile!r}", "profile")
        if self.snapshots not in get_args(Snapshots):
            raise SettingError(f"must be 'ends' or 'branches', got {self.snapshots!r}", "snapshots")
        check_whole(self.long_prefill_token_threshold, "long_prefill_token_threshold", least=0)
        check_number(self.watermark, "watermark", most=1.0)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise SettingError(
                f"{self.max_num_seqs} sequences cannot each get a token from a budget of "
                f"{self.max_num_batched_tokens} tokens a step",
                "max_num_seqs",
                "max_num_batched_tokens",
                of=self,
                hint=f"Raise {{max_num_batched_tokens}}, or set {{max_num_seqs}} to {self.max_num_batched_tokens} "
                "or less.",
            )

    @property
    def pool_tokens(self) -> int:
        """Number of tokens that the whole pool holds."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens occupy, including a partial last page."""
        return -(-num_tokens // self.page_size)
