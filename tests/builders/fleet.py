"""A random small fleet and its traffic, the same for the naive fleet and for kvarts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvarts.fleet.config import FleetConfig, PoolConfig

from builders.case import Case, cases
from oracles.naive_fleet import NaiveFleet, worker_of


@dataclass
class FleetCase:
    case: Case
    num_prefills: int
    num_decodes: int
    decode_pages: int
    decode_seqs: int
    rate: float | None
    latency_ms: float
    only_missing: bool

    @property
    def is_mocker(self) -> bool:
        return self.case.profile == "mocker"

    def config(self, **changes: Any) -> FleetConfig:
        prefill = self.case.config(replicas=self.num_prefills, audit=True, **changes)
        decode = self.case.config(
            replicas=self.num_decodes,
            num_pages=self.decode_pages,
            max_num_seqs=self.decode_seqs,
            audit=True,
            **changes,
        )
        return FleetConfig(
            pools=(PoolConfig(role="prefill", each=prefill), PoolConfig(role="decode", each=decode)),
            bytes_per_s=self.rate,
            latency_ms=self.latency_ms,
            transfer="missing" if self.only_missing else "full-prompt",
            token_bytes=1,
        )

    def naive(self) -> NaiveFleet:
        case = self.case
        settings = {"page_size": case.page_size, "max_num_batched_tokens": case.max_num_batched_tokens}
        fleet = NaiveFleet(
            [
                worker_of(
                    is_mocker=self.is_mocker,
                    is_decode=False,
                    num_pages=case.num_pages,
                    max_num_seqs=case.max_num_seqs,
                    **settings,
                )
                for _ in range(self.num_prefills)
            ],
            [
                worker_of(
                    is_mocker=self.is_mocker,
                    is_decode=True,
                    num_pages=self.decode_pages,
                    max_num_seqs=self.decode_seqs,
                    **settings,
                )
                for _ in range(self.num_decodes)
            ],
            self.is_mocker,
            self.rate,
            round(self.latency_ms * 1e6),
            self.only_missing,
        )
        fleet.run(case.naive_requests())
        return fleet


@st.composite
def fleets(draw: st.DrawFn, *, max_requests: int = 24, profile: str | None = None, cancels: bool = False) -> FleetCase:
    """Small pools, slow links, and everything that makes requests wait for each other."""
    case = draw(cases(max_requests=max_requests, cancels=cancels))
    if profile is not None:
        case.profile = profile
    most = max(-(-(row.num_prompt_tokens + row.num_output_tokens - 1) // case.page_size) for row in case.rows)
    return FleetCase(
        case,
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.sampled_from([1, 1, 2])),
        max(1, most + draw(st.sampled_from([-1, 0, 0, 1, 3, 10, 50]))),
        min(case.max_num_batched_tokens, draw(st.sampled_from([1, 2, 4, 8]))),
        draw(st.sampled_from([None, None, 50.0, 1000.0, 100000.0])),
        draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
        draw(st.booleans()),
    )
