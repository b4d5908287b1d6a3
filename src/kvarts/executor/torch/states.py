"""Layers with a state of constant size: linear attention, state spaces, short convolutions.

transformers offers no interface to replace such a layer, but all of them read their states from a cache and write the
new ones to it. They are therefore found by their use of a cache, and run by their own code: once for all sequences that
decode, and once per chunk of a sequence, each time with a cache that holds only these states. As with attention, calls
are numbered in order, and the States of the thread handle them.

For a convolution over the last n tokens, a transformers cache stores n; the next token reads the last n - 1, and only
these are stored here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import BoundArguments, Parameter, Signature, signature
from types import MethodType
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch.nn.functional import pad

__all__ = ["StateCall", "StateShape", "StateTensor", "States", "find_states", "keeping"]


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
        self._bound.arguments[self._hidden] = hidden
        self._bound.arguments[self._cache] = cache
        read: torch.Tensor = type(self._module).forward(*self._bound.args, **self._bound.kwargs)
        if not isinstance(read, torch.Tensor) or read.shape[:2] != hidden.shape[:2]:
            raise ValueError(f"{type(self._module).__name__} answers with more than a vector a token")
        return read


class States(Protocol):
    """Handles calls of layers with a state."""

    def state_called(self, call: StateCall) -> torch.Tensor:
        """Return the layer's output for its tokens, as [1, tokens, hidden_size]."""


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
    return states.state_called(StateCall(number, self, called.bind(self, *args, **kwargs), names))


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
