"""KV events with copies of blocks and reports of their reuse, as vLLM publishes them."""

from __future__ import annotations

from math import lcm
from typing import Any

from kvarts.core.content import Content
from kvarts.core.events import (
    Admitted,
    Arrived,
    Blocked,
    Cancelled,
    CopiesRemoved,
    CopiesStored,
    Event,
    Finished,
    HeadBlocked,
    Rejected,
    StepEnded,
    StepStarted,
)
from kvarts.core.keys import BlockKey
from kvarts.doors.kv_events.reader import MEDIA, Blocks, KvEventReader, Part

__all__ = ["CopiesReader", "ReportsReader"]


class CopiesReader(KvEventReader):
    """As KvEventReader, but with an event for each copy of a block on the device that is stored, and each removal.

    vLLM computes the last block of a prompt of whole blocks again when the prompt repeats, and publishes it again; so
    it does with blocks that requests compute side by side. A full state has as many stores of a block as copies.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._copies: dict[Part, dict[BlockKey, int]] = {}
        """Of each block with several copies, how many it has besides the first."""

    def _note(self, event: Event) -> None:
        if isinstance(event, CopiesStored):
            self._store_copies(event)
        elif isinstance(event, CopiesRemoved):
            self._remove_copies(event)
        else:
            super()._note(event)

    def _store_copies(self, event: CopiesStored) -> None:
        content, part = event.content, (MEDIA["device"], event.group)
        end = self._known_end(content, event.end_page, event.group)
        if end <= event.start_page:
            return
        run = self._run(content, event.start_page, end, event.parent, part)
        copies = self._copies.setdefault(part, {})
        for key in run.keys:
            copies[key] = copies.get(key, 0) + 1
        self._emit(run)

    def _remove_copies(self, event: CopiesRemoved) -> None:
        part = MEDIA["device"], event.group
        copies = self._copies.get(part, {})
        for key in self._keys_of_removed(event, part):
            if key not in copies:
                continue  # its tokens were not known when it was stored
            copies[key] -= 1
            if not copies[key]:
                del copies[key]
            self._removed.append(key)

    def _layers(self) -> list[Blocks]:
        blocks = self._resident.copy()
        layers: list[Blocks] = [blocks]
        number = 0
        while layers[-1]:
            number += 1
            more = {
                part: {key: blocks[part][key] for key, num_copies in copies.items() if num_copies >= number}
                for part, copies in self._copies.items()
            }
            layers.append({part: found for part, found in more.items() if found})
        return layers[:-1]


class ReportsReader(CopiesReader):
    """As CopiesReader, with the reports of requests in vLLM's `kv_cache_report_mode` `full`: all requests are.

    Whenever a request looks up its blocks, those that it finds are published again, from its first block on: when it is
    admitted, and in each step in which it waits for memory at the head of the queue.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._arrived: dict[int, tuple[Content, int]] = {}
        """The content and the prompt's tokens of each request that has not ended."""
        self._waiting: int | None = None
        """The request that waits for memory."""
        self._step = 0
        self._reported = 0
        """The last step in which it was looked up."""

    def _note(self, event: Event) -> None:
        super()._note(event)
        match event:
            case Arrived():
                self._arrived[event.request] = event.content, event.num_prompt_tokens
            case HeadBlocked():
                self._waiting = event.request if event.reason == Blocked.PAGES else None
                self._reported = self._step - 1
            case Admitted():
                self._waiting = None
                self._report(event.content, event.num_hit_pages)
            case StepStarted():
                self._step = event.step
            case StepEnded() if self._waiting is not None:
                content, num_prompt_tokens = self._arrived[self._waiting]
                num_found = self._num_found(content, (num_prompt_tokens - 1) // content.page_size)
                for _ in range(event.step - self._reported):  # decodes of many steps are one event
                    self._report(content, num_found)
                self._reported = event.step
            case Finished() | Cancelled() | Rejected():
                self._arrived.pop(event.request, None)
                if event.request == self._waiting:
                    self._waiting = None

    def _num_found(self, content: Content, most: int) -> int:
        """Return how many of the first `most` pages of `content` can be found in all groups."""
        keys = self._names.of(content, 0, most)
        hit_pages = lcm(*self._block_pages.values())
        num_found = most - most % hit_pages
        for (_, group), blocks in self._resident.parts_of(MEDIA["device"]).items():
            pages = self._block_pages.get(group, 1)
            of_blocks = range(0, num_found, pages)
            num_found = next((at for at in of_blocks if keys[at + pages - 1] not in blocks), num_found)
        return num_found - num_found % hit_pages

    def _report(self, content: Content, num_pages: int) -> None:
        end = min(num_pages, content.num_known_pages)
        if end:
            for part in self._resident.parts_of(MEDIA["device"]):
                self._emit(self._run(content, 0, end, None, part))
