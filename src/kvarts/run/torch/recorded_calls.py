"""Attentions without pages, under which a model is run to record its calls.

`AskedMasks` finds the windows of the masks that a model asks transformers for, and which call of attention gets which.

`plain_attention` is attention by its definition: the reference that a model is compared with before it runs in pages.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import torch

from kvarts.run.torch.attention import AttentionCall, AttentionParams, LatentShape, find_latent
from kvarts.run.torch.pools import LayerShape
from kvarts.run.torch.states import StateCall, States, StateShape

__all__ = [
    "Alone",
    "AskedMasks",
    "OneSequence",
    "Packed",
    "PagesRefusal",
    "RecordingAttention",
    "Seen",
    "causal",
    "plain_attention",
]

OWN = "has a mask of its own"


class AskedMasks:
    """Owner of the masks made for one forward pass. Positions up to `most_position` are examined."""

    def __init__(self, most_position: int) -> None:
        self._most_position = most_position
        self._made: list[tuple[torch.Tensor, torch.Tensor, str | None, int | None]] = []

    def make(self, asked: dict[str, Any]) -> torch.Tensor:
        """Return the additive mask that `asked` describes, in the keywords of transformers' mask functions."""
        from transformers.masking_utils import causal_mask_function, eager_mask

        reason, window = self._window(asked.get("mask_function", causal_mask_function))
        mask: torch.Tensor = eager_mask(
            **{**asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        self._made.append((mask, mask.clone(), reason, window))
        return mask

    def window_of(self, mask: Any) -> tuple[str | None, int | None]:
        """Return (None, window) of a call with `mask`, window None for all tokens; or (reason it cannot run, None)."""
        if mask is None:
            return "gets no mask", None
        for made, as_made, reason, window in self._made:
            is_same = isinstance(mask, torch.Tensor) and mask.data_ptr() == made.data_ptr()
            if is_same and mask.shape == as_made.shape and torch.equal(mask, as_made):
                return reason, window
        return OWN, None

    def _window(self, function: Any) -> tuple[str | None, int | None]:
        """Return the same for a mask function; a reason if its window is not equal at all positions."""
        windows: set[int] = set()
        furthest = 0
        last = self._most_position - 1
        for position in sorted({0, 1, 2, 3, 20, last // 7, last // 3, last // 2 + 1, last}):
            if position > last:
                continue
            places = torch.arange(position + 2)
            zero = torch.zeros_like(places)
            try:
                seen = torch.as_tensor(function(zero, zero, zero + position, places))
                seen = seen.expand(places.shape)
            except (RuntimeError, TypeError, IndexError, ValueError):
                return OWN, None
            if bool(seen[position + 1]):
                return "sees tokens that come after", None
            first = int(seen.to(torch.int8).argmax())
            if not bool(seen[first : position + 1].all()):
                return OWN, None
            if first:
                windows.add(position - first + 1)
            else:
                furthest = max(furthest, position + 1)
        if not windows:
            return None, None
        if len(windows) > 1 or furthest > min(windows):
            return "sees chunks, and not a window", None
        return None, windows.pop()


def causal(sequences: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the tokens that each token attends to, as [tokens, tokens]: its sequence, up to its position.

    `sequences` [tokens]: the number of the sequence of each token; `positions` [tokens]: its position there.
    """
    distance = positions[:, None] - positions[None]
    seen = (sequences[:, None] == sequences[None]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return seen


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, seen: torch.Tensor
) -> torch.Tensor:
    """Return attention of `queries` [tokens, heads, head_dim] in float32; `seen` [tokens, tokens] includes the window.

    `keys` and `values` [tokens, kv_heads, head_dim].
    """
    each = queries.shape[1] // keys.shape[1]
    of_heads = [states.float().repeat_interleave(each, dim=1).transpose(0, 1) for states in (keys, values)]
    scores = queries.float().transpose(0, 1) @ of_heads[0].transpose(1, 2) * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(-1, 1, 1).expand(-1, len(seen), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(seen)]
    return (weights @ of_heads[1]).transpose(0, 1)


class PagesRefusal(Exception):  # noqa: N818  # a result, with the reason
    """A call of attention that is not possible in pages."""


class Seen(msgspec.Struct):
    """The input of a call of attention: queries, keys and values as [tokens, heads, head_dim].

    `owner`: the first call with the same keys and values. `latent`: set for a layer with latents.
    """

    number: int
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    owner: int
    latent: LatentShape | None = None


class RecordingAttention:
    """An Attention that records its calls. Keeps tensors alive, so that no address is reused.

    `states`: handles layers with a state; None lets them run on the whole row, as one sequence.
    """

    states: States | None = None
    keeps_latents = False

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def called(self, call: AttentionCall) -> torch.Tensor:
        """Record the call, and return its output."""
        if call.query.dim() != 4 or len(call.query) != 1:
            raise ValueError(f"queries have the shape {list(call.query.shape)}")
        addresses = call.key.data_ptr(), call.value.data_ptr()
        owner = next(
            (number for number, key, value in self._kept if (key.data_ptr(), value.data_ptr()) == addresses),
            call.number,
        )
        if owner == call.number:
            self._kept.append((call.number, call.key, call.value))
        queries, keys, values = (states[0].transpose(0, 1) for states in (call.query, call.key, call.value))
        states = queries.clone(), keys.clone(), values.clone()
        self.seen.append(Seen(call.number, states, owner, find_latent(call.module)))
        return self.answer(call).to(call.query.dtype)

    def answer(self, call: AttentionCall) -> torch.Tensor:
        """Return the output of attention."""
        raise NotImplementedError

    def mask(self, **_: Any) -> Any:
        """Return no mask."""
        return None


class Alone(RecordingAttention):
    """Every token attends only to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.states = self.state_called

    def state_called(self, call: StateCall) -> torch.Tensor:
        """Return the output of a layer with a state, with each token as the first of a sequence."""
        return call.by_itself(call.hidden[0][:, None]).transpose(0, 1)

    def answer(self, call: AttentionCall) -> torch.Tensor:
        """Return the value of each token, for all heads that read it."""
        each = call.query.shape[1] // call.value.shape[1]
        return call.value[0].transpose(0, 1).repeat_interleave(each, dim=1).contiguous()


class Packed(RecordingAttention):
    """Several sequences in a row, as in a step.

    Layers with `states` run in pieces, as if over several steps, with the last tokens of all sequences together.
    """

    def __init__(
        self,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        shapes: tuple[LayerShape, ...],
        states: tuple[StateShape, ...] = (),
    ) -> None:
        super().__init__()
        self.states = self.state_called
        self.keeps_latents = any(shape.is_latent for shape in shapes)
        self._state_shapes = states
        self._places = [
            torch.nonzero(sequences == number)[:, 0][torch.argsort(positions[sequences == number])]
            for number in range(int(sequences.max()) + 1)
        ]
        self._shapes = shapes
        windows = {shape.window for shape in shapes}
        self._seen = {window: causal(sequences, positions, window) for window in windows}

    def answer(self, call: AttentionCall) -> torch.Tensor:
        """Attend within each sequence."""
        window = self._shapes[call.number].window
        read = plain_attention(*call.packed(), call.params(window), self._seen[window])
        return call.unpacked(read).contiguous()

    def state_called(self, call: StateCall) -> torch.Tensor:
        """Continue from state to state within each sequence."""
        shape = self._state_shapes[call.number]
        made = torch.empty_like(call.hidden)
        ends = []
        for places in self._places:
            middle, last = len(places) // 2, len(places) - 1
            read, states = call.run(shape, call.hidden[:, places[:middle]], None)
            made[:, places[:middle]] = read
            read, states = call.run(shape, call.hidden[:, places[middle:last]], states)
            made[:, places[middle:last]] = read
            ends.append(states)
        lasts = torch.stack([places[-1] for places in self._places])
        together = [torch.cat(states) for states in zip(*ends, strict=True)]
        read, _ = call.run(shape, call.hidden[0, lasts, None], together)
        made[0, lasts] = read[:, 0]
        return made


class OneSequence(RecordingAttention):
    """One sequence, with the masks that the model asks for; `windows`: the window of each call."""

    def __init__(self, length: int, most_position: int) -> None:
        super().__init__()
        self.windows: dict[int, int | None] = {}
        self._length = length
        self._masks = AskedMasks(most_position)

    def mask(self, **asked: Any) -> Any:
        """Return the mask that eager attention would get."""
        return self._masks.make(asked)

    def answer(self, call: AttentionCall) -> torch.Tensor:
        """Attend, and record the window. Raise PagesRefusal if the call is not standard attention."""
        reason, window = self._masks.window_of(call.mask)
        if reason is not None:
            raise PagesRefusal(f"call {call.number} of attention {reason}")
        self.windows[call.number] = window
        params = call.params(window)
        places = torch.arange(self._length, device=call.query.device)
        seen = causal(torch.zeros_like(places), places, window)
        if not _is_known(call, params, seen):
            raise PagesRefusal(f"call {call.number} of attention does more than attention that is known")
        return plain_attention(*call.packed(), params, seen)[..., : call.value.shape[-1]].contiguous()


def _is_known(call: AttentionCall, params: AttentionParams, seen: torch.Tensor) -> bool:
    """Return whether the model's own attention gives the same result on random numbers, in float32.

    Numbers are large, so that caps and biases matter. True for a model without an eager attention to compare with; it
    is compared as a whole.
    """
    own = getattr(sys.modules.get(type(call.module).__module__), "eager_attention_forward", None)
    if own is None:
        return True
    generator = torch.Generator().manual_seed(call.number)
    query, key, value = (
        (torch.randn(each.shape, generator=generator) * 2).to(call.query.device)
        for each in (call.query, call.key, call.value)
    )
    mask = call.mask.float() if isinstance(call.mask, torch.Tensor) else call.mask
    try:
        theirs = own(call.module, query, key, value, mask, **call.keywords)[0]
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return True
    random = AttentionCall(call.number, call.module, query, key, value, call.mask, call.keywords)
    mine = plain_attention(*random.packed(), params, seen)[..., : call.value.shape[-1]]
    theirs = theirs.reshape(mine.shape).float()
    return bool(((mine - theirs).abs().max() <= 2e-3 * theirs.abs().max()).item())
