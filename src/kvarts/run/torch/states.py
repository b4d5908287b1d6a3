"""Layers with a state of constant size: linear attention, state spaces, short convolutions.

transformers offers no interface to replace such a layer, but all of them read their states from a cache and write the
new ones to it. They are therefore found by their use of a cache, and run by their own code: once for all sequences that
decode, and once per chunk of a sequence, each time with a cache that holds only these states. As with attention, calls
are numbered in order, and the States of the thread handle them.

No state contains a token that may be rejected. The decodes of a step write their states; drafted tokens continue from
copies, which are dropped. What a layer was passed for drafted tokens is kept until it is known how many are accepted;
then the layer alone computes these again and writes the state after them.

For a convolution over the last n tokens, a transformers cache stores n; the next token reads the last n - 1, and only
these are stored here.

In the memory of a model's KV, each state occupies the bytes of some blocks, which layers with states read and
write.

A block is one row of every KV tensor. The bytes of a state are those of its blocks in the first tensor, in order, then
those in the second, and so on; they hold the states of all layers one after the other. The rest of the last blocks is
unused.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import BoundArguments, Parameter, Signature, signature
from types import MethodType
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.nn.functional import pad

from kvarts.run.flat_batch import Ints, StateBatch
from kvarts.run.torch.pools import KVPools

__all__ = ["PagedStates", "StateCall", "StateMemory", "StateShape", "StateTensor", "States", "find_states", "keeping"]

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Word types for copying states, the longest first."""


class StateTensor(msgspec.Struct, frozen=True):
    """One tensor of the state of one sequence. `number`: its index among those of its kind in the layer."""

    kind: Literal["recurrent", "conv"]
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


class StateShape(msgspec.Struct, frozen=True):
    """The state of a layer per sequence. `layer`: its index in a cache; `name`: its module's.

    `is_stepwise`: its code continues from a state only one token at a time, like Jamba in transformers 5.24.
    """

    name: str
    layer: int
    tensors: tuple[StateTensor, ...]
    is_stepwise: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the state in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class StateCall:
    """A model's call of a layer with a state. `number`: the call's index in its forward pass, from 0."""

    def __init__(self, number: int, module: Any, bound: BoundArguments, names: tuple[str, str]) -> None:
        self.number = number
        self._module = module
        self._bound = bound
        self._hidden, self._cache = names
        arguments = bound.arguments
        self.hidden: torch.Tensor = arguments[self._hidden]
        """[1, tokens, hidden_size]: all tokens of the forward pass."""
        if self.hidden.dim() != 3 or len(self.hidden) != 1:
            raise ValueError(f"hidden states have the shape {list(self.hidden.shape)}")
        # A mask is for padding, and there is none; other tensors per token cover the whole row, so they do not apply.
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                more = arguments.get(name, {})
                arguments[name] = {key: one for key, one in more.items() if not isinstance(one, torch.Tensor)}
            elif name != self._hidden and isinstance(arguments.get(name), torch.Tensor):
                arguments[name] = None

    def by_itself(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `hidden` [sequences, tokens, hidden_size], the first tokens of each
        sequence.
        """
        return self._run(hidden, None)

    def run(
        self, shape: StateShape, hidden: torch.Tensor, begin: Sequence[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the layer's output for `hidden` [sequences, tokens, hidden_size], and the states after it.

        `begin`: the states before it, each [sequences, ...], which may be overwritten; None: these are first tokens.
        """
        if shape.is_stepwise and begin is not None and hidden.shape[1] > 1:
            made = []
            for token in hidden.split(1, dim=1):
                read, begin = self.run(shape, token, begin)
                made.append(read)
            return torch.cat(made, dim=1), list(begin)
        cache, layer = _cache_of(shape, len(hidden), begin, hidden.device)
        read = self._run(hidden, cache)
        ends = []
        for one in shape.tensors:
            if one.kind == "conv":
                ends.append(layer.conv_states[one.number][..., 1:])
            else:
                ends.append(layer.recurrent_states[one.number])
            if ends[-1].dtype != one.dtype or ends[-1].shape[1:] != one.shape:
                raise ValueError(f"{shape.name} leaves a state of another shape than before")
        return read, ends

    def _run(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        arguments = self._bound.arguments
        arguments[self._hidden], arguments[self._cache] = hidden, cache
        read: torch.Tensor = type(self._module).forward(*self._bound.args, **self._bound.kwargs)
        arguments[self._hidden] = arguments[self._cache] = None  # a call that is kept has no states
        if not isinstance(read, torch.Tensor) or read.shape[:2] != hidden.shape[:2]:
            raise ValueError(f"{type(self._module).__name__} answers with more than a vector a token")
        return read


States = Callable[[StateCall], torch.Tensor]
"""Handles a call of a layer with a state: returns its output for its tokens, as [1, tokens, hidden_size]."""


class _Thread(threading.local):
    states: States | None = None
    num_calls: int = 0


_thread = _Thread()


@contextmanager
def keeping(states: States | None) -> Iterator[None]:
    """Have layers with states that run in this thread use `states`, for one forward pass."""
    before = _thread.states, _thread.num_calls
    _thread.states, _thread.num_calls = states, 0
    try:
        yield
    finally:
        _thread.states, _thread.num_calls = before


def _cache_of(
    shape: StateShape, num_sequences: int, begin: Sequence[torch.Tensor] | None, device: torch.device
) -> tuple[Any, Any]:
    """Return a transformers cache with the states of a layer, and its entry for that layer."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    layer = LinearAttentionLayer(number_of_states=1 + max(tensor.number for tensor in shape.tensors))
    for place, one in enumerate(shape.tensors):
        if begin is None:
            # Zeros stand for no previous state, so the layer does not have to allocate any.
            size = (*one.shape[:-1], one.shape[-1] + 1) if one.kind == "conv" else one.shape
            states = torch.zeros((num_sequences, *size), dtype=one.dtype, device=device)
        else:
            states = pad(begin[place], (1, 0)) if one.kind == "conv" else begin[place]
        if one.kind == "conv":
            layer.conv_states[one.number] = states
            layer.conv_kernel_size[one.number] = states.shape[-1]
            layer.is_conv_states_initialized[one.number] = True
        else:
            layer.recurrent_states[one.number] = states
            layer.is_recurrent_states_initialized[one.number] = True
        layer.has_previous_state[one.number] = begin is not None
    layer.dtype, layer.device = shape.tensors[0].dtype, device
    return Cache(layers=[layer] * (shape.layer + 1)), layer


# Search ---------------------------------------------------------------------------------------------------

_names: dict[type, tuple[Signature, tuple[str, str]]] = {}
"""By module class: the signature of its forward, and the names of its hidden states and its cache."""


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a layer's forward: pass the call to the thread's States, or run the original without one."""
    states = _thread.states
    if states is None:
        return type(self).forward(self, *args, **kwargs)
    number = _thread.num_calls
    _thread.num_calls += 1
    called, names = _names[type(self)]
    return states(StateCall(number, self, called.bind(self, *args, **kwargs), names))


def find_states(model: Any, run: Callable[[Any], Any]) -> tuple[StateShape, ...]:
    """Return the state of each layer that has one, in the order of their calls, and patch these layers to use States.

    `run`: runs the model on a few tokens with a cache. Raise ValueError, with the reason, for layers that cannot run
    sequence by sequence.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not any(hasattr(layer, "conv_states") for layer in cache.layers):
        return ()
    seen = _Seen(cache)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(seen.begin, with_kwargs=True))
        handles.append(module.register_forward_hook(seen.end, with_kwargs=True, always_call=True))
    try:
        run(cache)
    finally:
        for handle in handles:
            handle.remove()
    names = {id(module): name for name, module in model.named_modules()}
    shapes = []
    for module, number in seen.found:
        if seen.num_runs[id(module)] != 1:
            raise ValueError(f"{names[id(module)]} has a state and runs {seen.num_runs[id(module)]} times")
        shapes.append(StateShape(names[id(module)], number, _tensors(cache.layers[number])))
        module.forward = MethodType(_forward, module)
    return tuple(shapes)


class _Seen:
    """Records which modules write states to a cache."""

    def __init__(self, cache: Any) -> None:
        self.found: list[tuple[Any, int]] = []
        """Modules and their indexes in the cache."""
        self.num_runs: dict[int, int] = {}
        self._cache = cache
        self._stack: list[Any] = []
        self._wrap("update_conv_state")
        self._wrap("update_recurrent_state")

    def _wrap(self, name: str) -> None:
        update = getattr(self._cache, name)

        def noted(states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            pair = self._stack[-1], layer_idx
            if not any(module is pair[0] for module, _ in self.found):
                self.found.append(pair)
            return update(states, layer_idx, *args, **kwargs)

        setattr(self._cache, name, noted)

    def begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a module that receives the cache."""
        self.num_runs[id(module)] = self.num_runs.get(id(module), 0) + 1
        if any(one is self._cache for one in (*args, *kwargs.values())):
            self._stack.append(module)
            if type(module) not in _names:
                called = signature(type(module).forward)
                arguments = called.bind(module, *args, **kwargs).arguments
                cache_name = next((name for name, one in arguments.items() if one is self._cache), "")
                hidden_name = [*called.parameters][1]
                if cache_name:
                    _names[type(module)] = called, (hidden_name, cache_name)

    def end(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        """Record that a module has returned."""
        if self._stack and self._stack[-1] is module:
            self._stack.pop()


def _tensors(layer: Any) -> tuple[StateTensor, ...]:
    """Return the tensors of a cache layer, without the oldest token of convolutions."""
    found: list[StateTensor] = []
    for number, states in layer.recurrent_states.items():
        if states is not None:
            found.append(StateTensor("recurrent", number, tuple(states.shape[1:]), states.dtype))
    for number, states in layer.conv_states.items():
        if states is not None:
            shape = (*states.shape[1:-1], states.shape[-1] - 1)
            found.append(StateTensor("conv", number, shape, states.dtype))
    return tuple(found)


class _Piece(msgspec.Struct, frozen=True):
    """Some bytes of every block, in one tensor, which are a part of the blocks [first, last) of a state.

    `memory` [blocks, words]: these bytes, as the longest words that divide them, since copying a byte is as slow as
    copying a word.
    """

    memory: torch.Tensor
    first: int
    last: int

    @classmethod
    def of(cls, rows: torch.Tensor, first: int, last: int, start: int, stop: int) -> _Piece:
        """Return bytes [start, stop) of `rows` [blocks, bytes]."""
        word = next(word for word in WORDS if not any(at % word.itemsize for at in (rows.shape[1], start, stop)))
        return cls(rows.view(word)[:, start // word.itemsize : stop // word.itemsize], first, last)

    @property
    def num_bytes(self) -> int:
        """Its bytes per state."""
        return (self.last - self.first) * int(self.memory.shape[1]) * int(self.memory.dtype.itemsize)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the bytes of states in `blocks` [states, blocks], as [states, bytes]."""
        rows = blocks[:, self.first : self.last].reshape(-1)
        return self.memory.index_select(0, rows).view(torch.uint8).view(len(blocks), -1)

    def write(self, blocks: torch.Tensor, written: torch.Tensor) -> None:
        """Write the bytes of states, as `read` returns them."""
        rows = blocks[:, self.first : self.last].reshape(-1)
        each = written.reshape(len(rows), -1)
        if each.storage_offset() % self.memory.dtype.itemsize:
            each = each.clone()
        self.memory.index_copy_(0, rows, each.contiguous().view(self.memory.dtype))


class StateMemory:
    """The states of layers with `shapes` in `tensors`, where a row is a block; a state has `num_blocks` blocks."""

    def __init__(self, tensors: Sequence[torch.Tensor], shapes: Sequence[StateShape], num_blocks: int) -> None:
        self.shapes = tuple(shapes)
        self._rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors]
        self.num_blocks = num_blocks
        assert sum(shape.num_bytes for shape in shapes) <= num_blocks * sum(rows.shape[1] for rows in self._rows)
        self._pieces: list[list[list[_Piece]]] = []
        """Per layer, and per tensor of its state."""
        at = 0
        for shape in shapes:
            self._pieces.append([])
            for tensor in shape.tensors:
                self._pieces[-1].append(self._cut(at, at + tensor.num_bytes))
                at += tensor.num_bytes

    def _cut(self, begin: int, end: int) -> list[_Piece]:
        """Return the pieces that contain bytes [begin, end) of a state."""
        pieces = []
        base = 0
        for rows in self._rows:
            size = rows.shape[1]
            at, stop = max(0, begin - base), min(self.num_blocks * size, end - base)
            while at < stop:
                block, place = divmod(at, size)
                last = stop // size
                if place == 0 and last > block:
                    pieces.append(_Piece.of(rows, block, last, 0, size))
                    at = last * size
                else:
                    until = min(size, place + stop - at)
                    pieces.append(_Piece.of(rows, block, block + 1, place, until))
                    at += until - place
            base += self.num_blocks * size
        return pieces

    def read(self, number: int, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of the states of layer `number` in `blocks` [states, blocks], tensor by tensor."""
        states = []
        for tensor, pieces in zip(self.shapes[number].tensors, self._pieces[number], strict=True):
            read = [piece.read(blocks) for piece in pieces]
            together = read[0] if len(read) == 1 else torch.cat(read, dim=1)
            states.append(together.view(tensor.dtype).view(len(blocks), *tensor.shape))
        return states

    def write(self, number: int, blocks: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Write the states of layer `number` to `blocks` [states, blocks], in the form that `read` returns."""
        for one, pieces in zip(states, self._pieces[number], strict=True):
            written = one.reshape(len(blocks), -1).contiguous().view(torch.uint8)
            at = 0
            for piece in pieces:
                piece.write(blocks, written[:, at : at + piece.num_bytes])
                at += piece.num_bytes


class _Drafted(msgspec.Struct, frozen=True):
    """Drafted tokens, by sequence, those with the most tokens first.

    `decodes`: the index of each sequence's decode. `starts`: the places of its first token among all drafted tokens.
    `counts`: its number of tokens.
    """

    decodes: Ints
    starts: Ints
    counts: Ints

    @classmethod
    def of(cls, drafted: Ints) -> _Drafted:
        """Return the tokens of a StateBatch."""
        decodes, starts, counts = np.unique(drafted, return_index=True, return_counts=True)
        return cls(decodes, starts, counts).ordered()

    def ordered(self) -> _Drafted:
        """Return the sequences in order."""
        order = np.argsort(-self.counts, kind="stable")
        return _Drafted(self.decodes[order], self.starts[order], self.counts[order])

    def accepted(self, counts: Ints) -> _Drafted:
        """Return the tokens that were accepted, `counts` [decodes] of each sequence."""
        mine = counts[self.decodes]
        has_any = mine > 0
        return _Drafted(self.decodes[has_any], self.starts[has_any], mine[has_any]).ordered()

    def run(
        self, call: StateCall, shape: StateShape, states: list[torch.Tensor]
    ) -> Iterator[tuple[Ints, torch.Tensor, list[torch.Tensor]]]:
        """Run the layer on the first token of each sequence, the second of those that have two, and so on.

        `call`: with the hidden states of drafted tokens; `states`: the state of each sequence before its first. Yield
        the places of the tokens of a run, the output for them, and the states after them.
        """
        hidden = call.hidden[0]
        for turn in range(int(self.counts.max(initial=0))):
            count = int((self.counts > turn).sum())
            places = self.starts[:count] + turn
            read, states = call.run(shape, hidden[places][:, None], [one[:count] for one in states])
            yield places, read[:, 0], states


class PagedStates:
    """States of the sequences of a step: layers start from the blocks that the plan names, and write theirs there.

    A step with drafted tokens ends with `accept`.
    """

    def __init__(self, pools: KVPools, shapes: Sequence[StateShape], num_blocks: int) -> None:
        self.memory = StateMemory(pools.tensors, shapes, num_blocks)
        self._device = pools.device
        self._decodes = torch.empty((0, num_blocks), dtype=torch.long)
        self._chunks: list[tuple[int, torch.Tensor | None, list[tuple[int, torch.Tensor]]]] = []
        self._num_drafted = 0
        self._drafted = _Drafted.of(np.zeros(0, np.int64))
        self._calls: list[StateCall] = []
        """The calls of the step, each with the hidden states of its drafted tokens, if it has any."""

    def begin(self, batch: StateBatch) -> None:
        """Prepare for the step that `batch` describes."""
        self._decodes = torch.from_numpy(batch.blocks).to(self._device)
        self._num_drafted = len(batch.drafted)
        self._drafted = _Drafted.of(batch.drafted)
        self._calls = []
        self._chunks = []
        for chunk in batch.chunks:
            begins_from = chunk.begins_from
            before = None if begins_from is None else torch.from_numpy(begins_from).to(self._device)[None]
            leaves = [(at, torch.from_numpy(blocks).to(self._device)[None]) for at, blocks in chunk.leaves]
            self._chunks.append((chunk.first, before, leaves))

    def state_called(self, call: StateCall) -> torch.Tensor:
        """Run a layer: all decodes together, drafted tokens after them, then one chunk after the other."""
        number, hidden, memory = call.number, call.hidden, self.memory
        shape = memory.shapes[number]
        made = []
        num_decodes = len(self._decodes)
        if num_decodes:
            read, states = call.run(shape, hidden[0, :num_decodes, None], memory.read(number, self._decodes))
            memory.write(number, self._decodes, states)
            made.append(read[:, 0])
            if self._num_drafted:
                call.hidden = hidden[:, num_decodes : num_decodes + self._num_drafted].clone()
                self._calls.append(call)
                made.append(self._read_drafted(call, shape, [one[self._drafted.decodes] for one in states]))
        for first, before, leaves in self._chunks:
            at = first
            kept = None if before is None else memory.read(number, before)
            for last, blocks in leaves:
                if last > at:
                    read, kept = call.run(shape, hidden[:, at:last], kept)
                    made.append(read[0])
                    at = last
                assert kept is not None
                memory.write(number, blocks, kept)
        return torch.cat(made)[None]

    def _read_drafted(self, call: StateCall, shape: StateShape, states: list[torch.Tensor]) -> torch.Tensor:
        """Return a layer's output for the drafted tokens, and write nothing. `states`: those after the decodes."""
        places, made = [], []
        for at, read, _ in self._drafted.run(call, shape, states):
            places.append(at)
            made.append(read)
        return torch.cat(made)[np.argsort(np.concatenate(places))]

    def accept(self, counts: Ints) -> None:
        """Write the states after the accepted drafted tokens of the step, `counts` [decodes] of them."""
        calls, self._calls = self._calls, []
        accepted = self._drafted.accepted(counts)
        blocks, memory = self._decodes[accepted.decodes], self.memory
        for call in calls if len(blocks) else ():
            number = call.number
            states = memory.read(number, blocks)
            for turn, (places, _, ends) in enumerate(accepted.run(call, memory.shapes[number], states), 1):
                num_more = int((accepted.counts > turn).sum())
                last = slice(num_more, len(places))
                if num_more < len(places):
                    memory.write(number, blocks[last], [one[last] for one in ends])
