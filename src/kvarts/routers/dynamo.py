"""NVIDIA Dynamo's KV router, as of 1.6.1: the fewest blocks to compute and to keep. Names and defaults are Dynamo's."""

from __future__ import annotations

from math import ceil, exp
from typing import Literal

import msgspec

from kvarts.limits import check_number
from kvarts.routers.view import Asked, Needs, View
from kvarts.settings import SettingError

__all__ = ["DynamoKv"]


class DynamoKv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """cost = prefill_load_scale * max(0, prefill blocks - hits) + blocks in flight + weight * requests; least wins.

    Prefill blocks are the uncached prompt tokens in flight plus the prompt tokens of this request, in blocks. Hits:
    blocks on the device times `overlap_score_credit`, plus those in host memory and on disk times their weights. The
    credit of a worker shrinks with `overlap_score_credit_decay` as it has more to prefill than the worker with the
    least. Blocks in flight are the distinct blocks of all requests of the worker, including this one. Ties are broken
    at random. With a `temperature`, all choices are random, with higher probability for lower costs.

    `role`: a decode pool counts only the blocks, each request's separately; a prefill pool counts only the prefill.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    temperature: float = 0.0
    role: Literal["mixed", "prefill", "decode"] = "mixed"

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[:-1]:
            check_number(getattr(self, field), field, most=1e9)
        if self.role not in ("mixed", "prefill", "decode"):
            raise SettingError(f"must be 'mixed', 'prefill' or 'decode', got {self.role!r}", "role")

    @property
    def needs(self) -> Needs:
        """Cache events of ended steps, and the blocks in flight."""
        if self.role == "decode":
            return Needs()
        return Needs(pages="end", prefills=True, blocks=self.role == "mixed")

    def choose(self, asked: Asked, view: View) -> int:
        """Return a worker of the least cost."""
        costs = self.costs(asked, view)
        if not self.temperature:
            return view.any_least(costs)
        among = [costs[worker] for worker in view.workers]
        least = min(among)
        scale = (max(among) - least) * self.temperature
        if not scale:
            return view.any_of(view.workers)
        weights = [exp((least - cost) / scale) for cost in among]
        view.num_tied += 1
        return view.random.choices(view.workers, weights)[0]

    def costs(self, asked: Asked, view: View) -> list[float]:
        """Return the costs, indexed by worker."""
        size = view.page_size
        num_blocks = asked.num_tokens // size
        requests = view.num_requests
        weight = self.decode_active_request_weight
        if self.role == "decode":
            costs = [float(blocks + num_blocks) for blocks in view.num_blocks]
        else:
            prefill = view.prefill_tokens
            blocks = [(tokens + asked.num_tokens) / size for tokens in prefill]
            for worker, pages in view.pages(asked, num_blocks).items():
                blocks[worker] -= self._credit(asked, view, worker) * pages[0]
                for saved, pages_below in zip((self.host_weight, self.disk_weight), pages[1:], strict=False):
                    blocks[worker] -= saved * pages_below
            costs = [self.prefill_load_scale * max(0.0, each) for each in blocks]
            if view.active is not None:
                for worker, in_flight in view.active.num_blocks.items():
                    costs[worker] += in_flight
                for worker, shared in view.active.shared(asked.content, num_blocks).items():
                    costs[worker] -= shared
                costs = [cost + num_blocks for cost in costs]
        return [cost + weight * count for cost, count in zip(costs, requests, strict=True)] if weight else costs

    def cached_tokens(self, asked: Asked, worker: int, view: View) -> int:
        """Return the tokens of the blocks that `worker` has on its device."""
        found = view.pages(asked, asked.num_tokens // view.page_size).get(worker)
        return 0 if found is None else found[0] * view.page_size

    def _credit(self, asked: Asked, view: View, worker: int) -> float:
        if not self.overlap_score_credit_decay:
            return self.overlap_score_credit
        prefill = view.prefill_tokens
        more = (prefill[worker] - min(map(prefill.__getitem__, view.workers))) / view.page_size
        share = more / ceil(asked.num_tokens / view.page_size)
        return self.overlap_score_credit / (1 + self.overlap_score_credit_decay * share)
