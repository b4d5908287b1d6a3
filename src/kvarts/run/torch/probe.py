"""Examines how a model uses attention by running it, since no config field or name gives that for all models.

A model that runs in pages must pass everything that tokens know of each other through attention, as queries, keys and
values that depend only on the token, the tokens before it, and its position. `examine` runs a model on a few tokens
under attentions that record the calls, and refuses it with a reason if that does not hold; it also compares the model's
normal output with its output when several sequences share a row, as they do in a step.

Some rotations depend on the length of a sequence: one set of factors up to a length, another beyond it. transformers
chooses the factors by the largest position of a row. In a step, a row has many sequences, so each token's factors are
chosen here, by the length of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
from msgspec.structs import replace

from kvarts.base.errors import ConfigError, first_line
from kvarts.run.torch.attention import ATTENTION, attending, find_latent, keep_latents, register, takes_latents
from kvarts.run.torch.decoder import Decoder
from kvarts.run.torch.pools import LayerShape
from kvarts.run.torch.recorded_calls import Alone, OneSequence, Packed, PagesRefusal, RecordingAttention, Seen
from kvarts.run.torch.states import StateShape, find_states, keeping

__all__ = ["Facts", "RopeSwitch", "examine", "find_switch", "refused"]

NEAR = (0, 1, 2, 3)


class RopeSwitch:
    """The rotary modules of a model, patched to choose factors per token. `length`: the longest short sequence.

    Outside of `chosen`, all modules behave as before.
    """

    def __init__(self, modules: list[Any], length: int) -> None:
        self.length = length
        self._are_long: torch.Tensor | None = None
        for module in modules:
            self._replace(module, module.forward)

    @contextmanager
    def chosen(self, are_long: torch.Tensor) -> Iterator[None]:
        """Rotate by the factors of long sequences where `are_long` [tokens] is set, for one forward pass."""
        self._are_long = are_long
        try:
            yield
        finally:
            self._are_long = None

    def _replace(self, module: Any, forward: Any) -> None:
        def by_token(states: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            are_long = self._are_long
            if are_long is None:
                return forward(states, position_ids, *args, **kwargs)
            # The largest position decides: one extra position makes all long, and zeros for long sequences make all
            # short.
            beyond = position_ids.new_full((*position_ids.shape[:-1], 1), self.length)
            long = forward(states, torch.cat((position_ids, beyond), dim=-1), *args, **kwargs)
            short = forward(states, torch.where(are_long, 0, position_ids), *args, **kwargs)
            choose = are_long[None, :, None]
            return tuple(torch.where(choose, a[..., :-1, :], b) for a, b in zip(long, short, strict=True))

        module.forward = by_token


def find_switch(model: Any, most_position: int, device: torch.device) -> RopeSwitch | None:
    """Return the RopeSwitch of a model; None if its rotation does not depend on the length of a sequence.

    Raise ConfigError for a rotation with more than two sets of factors.
    """
    found: list[tuple[Any, int]] = []
    for module in model.modules():
        is_rotary = any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        if not is_rotary:
            continue
        for kind in _kinds(module):
            length = _length(module, kind, most_position, model, device)
            if length is not None:
                found.append((module, length))
    if not found:
        return None
    lengths = {length for _, length in found}
    if len(lengths) > 1:
        raise ConfigError(f"has rotations that change at {sorted(lengths)} tokens", field="model_type")
    modules = list({id(module): module for module, _ in found}.values())
    return RopeSwitch(modules, lengths.pop())


def _kinds(module: Any) -> list[str | None]:
    """Return the kinds of layers that a module has rotations for; [None] for a module with one rotation."""
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) else [None]


def _length(module: Any, kind: str | None, most_position: int, model: Any, device: torch.device) -> int | None:
    """Return the length of the longest sequence that uses the short factors; None if all use the same."""

    def near(furthest: int) -> torch.Tensor:
        positions = torch.tensor([[*NEAR, furthest]], device=device)
        states = torch.zeros(1, len(NEAR) + 1, 1, dtype=torch.float32, device=device)
        out = module(states, positions) if kind is None else module(states, positions, kind)
        parts = out if isinstance(out, tuple) else (out,)
        return torch.cat([part[..., : len(NEAR), :].float().flatten() for part in parts])

    try:
        short = near(NEAR[-1] + 1).clone()
        long = near(most_position - 1).clone()
    except Exception:  # a model's code may raise anything
        return None  # a rotation with another signature: the model is examined as a whole
    if torch.equal(short, long):
        return None
    low, high = NEAR[-1] + 1, most_position - 1
    while high - low > 1:
        middle = (low + high) // 2
        if torch.equal(near(middle), short):
            low = middle
        else:
            high = middle
    # A position p belongs to a sequence of p + 1 tokens.
    if not torch.equal(near(high), long) or not torch.equal(near(low), short):
        raise ConfigError(
            f"{model.config.model_type} rotates by the longest sequence of a step",
            field="model_type",
            hint="Only rotations with one set of factors for short sequences and one for long ones can be run.",
        )
    return low + 1


MOST_POSITION = 1 << 20
"""Positions up to this are examined."""
LENGTHS = (21, 13)
"""Lengths of the sequences that are compared."""


class Facts(msgspec.Struct, frozen=True):
    """The properties of a model that can run in pages.

    `layers`: the KV that each of its calls of attention stores. `keeps_logits`: it can compute logits at chosen places
    only. `switch`: set if its rotation depends on the length of a sequence. `states`: the state of each layer that has
    one of constant size.
    """

    layers: tuple[LayerShape, ...]
    keeps_logits: bool
    switch: RopeSwitch | None
    states: tuple[StateShape, ...] = ()


def examine(model: Any) -> Facts:
    """Return the facts of a model, and have it attend through pages from now on. Results are cached per model.

    Raise ConfigError, with the reason, for a model that cannot run in pages.
    """
    if isinstance(model, Decoder):
        return Facts(model.layer_shapes, keeps_logits=True, switch=None)
    if model not in _known:
        _take_attention(model)
        with torch.inference_mode():
            _known[model] = _Examination(model).facts()
    return _known[model]


_known: WeakKeyDictionary[Any, Facts] = WeakKeyDictionary()


def refused(model: Any, why: str) -> ConfigError:
    """Return the error for a model that cannot run in pages."""
    return ConfigError(
        f"{model.config.model_type} cannot run in pages: {why}",
        field="model_type",
        hint="`kvarts model check DIR` says what is supported.",
    )


def _take_attention(model: Any) -> None:
    """Have `model` call this package for attention."""
    if not model._can_set_attn_implementation():
        raise refused(model, "its layers do not ask for attention through transformers' AttentionInterface")
    register()
    model.set_attn_implementation(ATTENTION)


class _Examination:
    """The test runs of one model and their results."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = model.device
        text = model.config.get_text_config(decoder=True)
        vocabulary = int(getattr(text, "vocab_size", 0) or model.get_input_embeddings().weight.shape[0])
        generator = torch.Generator().manual_seed(1)
        named = [getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
        special = {token for one in named for token in (one if isinstance(one, list) else [one])}
        ids = torch.randint(vocabulary, (4 * sum(LENGTHS),), generator=generator).tolist()
        ids = [token for token in ids if token not in special] or ids
        self._ids = (ids * sum(LENGTHS))[: sum(LENGTHS)]
        most = getattr(text, "max_position_embeddings", None)
        self._most_position = min(most if isinstance(most, int) and most > 0 else 4096, MOST_POSITION)
        self._is_exact = model.dtype == torch.float32
        self._has_positions = _takes(model, "position_ids")
        self._keeps_logits = _takes(model, "logits_to_keep")

    def facts(self) -> Facts:
        """Run all tests, the cheapest first, and return the facts."""
        model = self._model
        if not self._has_positions:
            raise refused(model, "it takes no position_ids: its positions are its own")
        own = self._run_by_itself()
        states = self._look_at_states()
        calls = self._look_at_calls()
        switch = find_switch(model, self._most_position, self._device)
        self._look_at_tokens(self._most_position if switch is None else switch.length)
        shapes = self._look_at_masks(calls)
        states = self._compare(own, shapes, switch, states)
        self._look_at_cache(own, shapes)
        shapes = self._keep_latents(own, calls, shapes, switch, states)
        return Facts(shapes, self._keeps_logits, switch, states)

    # Tests ------------------------------------------------------------------------------------------------

    def _run_by_itself(self) -> list[torch.Tensor]:
        """Return the logits of each sequence as the model computes them without pages, after a test for causality."""
        model = self._model
        sequences = self._sequences()
        changed = [*sequences[0][:-1], sequences[1][0]]
        try:
            model.set_attn_implementation("eager")
            logits = []
            for ids in [*sequences, changed]:
                ids_tensor = torch.tensor([ids], device=self._device)
                out = model(input_ids=ids_tensor, attention_mask=torch.ones_like(ids_tensor), use_cache=False)
                logits.append(out.logits[0].float())
        except Exception as error:  # a model's code may raise anything
            raise refused(model, f"it does not run on tokens alone ({_named_line(error)})") from error
        finally:
            model.set_attn_implementation(ATTENTION)
        if logits[0].dim() != 2 or len(logits[0]) != len(sequences[0]):
            raise refused(model, f"its logits for {LENGTHS[0]} tokens have the shape {list(logits[0].shape)}")
        if not bool(torch.isfinite(logits[0]).all()):
            raise refused(model, "its logits are not finite")
        if self._differ(logits[2][:-1], logits[0][:-1]):
            raise refused(model, "a token sees tokens that come after it, as in an encoder")
        return logits[:2]

    def _look_at_states(self) -> tuple[StateShape, ...]:
        """Return the state of each layer that has one."""
        model = self._model
        ids = torch.tensor([self._sequences()[0]], device=self._device)

        def run(cache: Any) -> None:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **{_cache_name(model): cache})

        try:
            model.set_attn_implementation("eager")
            return find_states(model, run)
        except Exception as error:  # a model's code may raise anything
            raise refused(model, f"its layers keep states in a way that is not known ({_named_line(error)})") from error
        finally:
            model.set_attn_implementation(ATTENTION)

    def _look_at_calls(self) -> list[Seen]:
        """Return the input of each call of attention, for tokens that are separate sequences."""
        model = self._model
        seen = self._run(Alone(), self._ids[:6], list(range(6)))[1]
        if not seen:
            raise refused(model, "its layers never ask for attention")
        for call in seen:
            queries, keys, values = call.states
            counts = [len(states) for states in call.states]
            if counts != [6] * 3 or queries.shape[1] % keys.shape[1] or keys.shape[1] != values.shape[1]:
                shapes = ", ".join(str(list(states.shape)) for states in call.states)
                raise refused(model, f"call {call.number} of attention has queries, keys and values of shapes {shapes}")
        return seen

    def _look_at_tokens(self, most: int) -> None:
        """Test that a token depends on others only through attention, at positions below `most`."""
        model = self._model
        near = [min(position, max(0, most - 3)) for position in (0, 1, 5, most // 5, most // 2)]
        ids, other = self._ids[:6], self._ids[7]
        base, before = self._run(Alone(), ids, [*near, near[-1] + 1])
        cases = (
            ([*ids[:-1], other], [*near, near[-1] + 1], slice(0, 5), "on tokens beside it in the step"),
            (ids, [*near, most - 1], slice(0, 5), "on the positions of tokens beside it in the step"),
            (
                [other, *ids[1:]],
                [7 % most, *near[1:], near[-1] + 1],
                slice(1, 6),
                "on tokens before it, without attention",
            ),
            (ids, [*near, near[-1] + 1], slice(0, 6), "on what was computed before"),
        )
        for case_ids, positions, rows, on_what in cases:
            logits, seen = self._run(Alone(), case_ids, positions)
            if len(seen) != len(before):
                raise refused(model, f"it asks for attention {len(before)} times or {len(seen)} times")
            pairs = [(logits[rows], base[rows])]
            for one, two in zip(seen, before, strict=True):
                pairs += [(a[rows], b[rows]) for a, b in zip(one.states, two.states, strict=True)]
            if any(self._differ(a.flatten(1).float(), b.flatten(1).float()) for a, b in pairs):
                raise refused(model, f"what it computes for a token depends {on_what}")
        if self._keeps_logits:
            try:
                kept = self._run(Alone(), ids, [*near, near[-1] + 1], keep=[1, 4])[0]
                self._keeps_logits = kept.shape == base[[1, 4]].shape and not self._differ(kept, base[[1, 4]])
            except (RuntimeError, TypeError, ValueError, IndexError):
                self._keeps_logits = False

    def _look_at_masks(self, calls: list[Seen]) -> tuple[LayerShape, ...]:
        """Return the shape and window of each call, after a test that it is standard attention."""
        watched = OneSequence(LENGTHS[0], self._most_position)
        _, seen = self._run(watched, self._ids[: LENGTHS[0]], list(range(LENGTHS[0])))
        shapes = []
        for call in calls:
            queries, keys, values = call.states
            head_dim = max(keys.shape[2], values.shape[2])
            shapes.append(
                LayerShape(queries.shape[1], keys.shape[1], head_dim, call.owner, watched.windows[call.number])
            )
        assert len(seen) == len(calls)
        return tuple(shapes)

    def _look_at_cache(self, own: list[torch.Tensor], shapes: tuple[LayerShape, ...]) -> None:
        """Test that `generate`, which continues from a cache, computes the same as a single pass."""
        model = self._model
        ids = torch.tensor([self._sequences()[0]], device=self._device)
        try:
            model.set_attn_implementation("eager")
            begun = model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=True)
            name = _cache_name(model)
            cache = getattr(begun, name)
            last = model(input_ids=ids[:, -1:], attention_mask=torch.ones_like(ids), use_cache=True, **{name: cache})
            logits = last.logits[0, -1:].float()
        except Exception as error:  # a model's code may raise anything
            raise refused(model, f"it does not go on from a cache ({_named_line(error)})") from error
        finally:
            model.set_attn_implementation(ATTENTION)
        kept = [getattr(layer, "sliding_window", None) for layer in getattr(cache, "layers", ())]
        windows = [shape.window for shape in shapes]
        if len(kept) == len(windows):
            pairs = zip(kept, windows, strict=True)
            forgets = any(most is not None and (window is None or window > most) for most, window in pairs)
        else:
            forgets = any(kept) and None in windows
        if forgets or self._differ(logits, own[0][-1:], several=10.0):
            raise refused(model, "going on from its cache it computes something else than at once: the two disagree")

    def _compare(
        self,
        own: list[torch.Tensor],
        shapes: tuple[LayerShape, ...],
        switch: RopeSwitch | None,
        states: tuple[StateShape, ...],
    ) -> tuple[StateShape, ...]:
        """Compare the model's normal output with several sequences in a row; return `states`, stepwise if necessary."""
        sequences = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        # In random order, so that no result is right only because of a token's place in the row.
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(3))
        mixed = sequences[order].to(self._device), positions[order].to(self._device)
        ids = [self._ids[place] for place in order.tolist()]

        def differs(states: tuple[StateShape, ...]) -> bool:
            chosen: AbstractContextManager[None] = nullcontext()
            if switch is not None:
                chosen = switch.chosen(torch.tensor(LENGTHS, device=self._device)[mixed[0]] > switch.length)
            with chosen:
                logits, _ = self._run(Packed(*mixed, shapes, states), ids, mixed[1].tolist())
            each = logits[torch.argsort(order).to(self._device)].split(LENGTHS)
            return any(self._differ(mine, alone, several=10.0) for mine, alone in zip(each, own, strict=True))

        if not differs(states):
            return states
        why = "its positions, its masks or its attention are its own"
        if states:
            stepwise = tuple(replace(state, is_stepwise=True) for state in states)
            if not differs(stepwise):
                return stepwise
            why = f"layers with a state ({states[0].name} is the first) do not go on from it, or {why}"
        raise refused(self._model, f"with several sequences in a step it computes something else than by itself: {why}")

    def _keep_latents(
        self,
        own: list[torch.Tensor],
        calls: list[Seen],
        shapes: tuple[LayerShape, ...],
        switch: RopeSwitch | None,
        states: tuple[StateShape, ...],
    ) -> tuple[LayerShape, ...]:
        """Return the shapes with latents as they are, if every layer has one and the model then computes the same."""
        if any(call.latent is None or call.owner != call.number for call in calls):
            return shapes
        modules = [(module, shape) for module in self._model.modules() if (shape := find_latent(module)) is not None]
        if not all(shape.is_that_of(module) for module, shape in modules):
            return shapes
        kept = tuple(
            replace(shape, num_kv_heads=1, head_dim=call.latent.head_dim, is_latent=True)
            for call, shape in zip(calls, shapes, strict=True)
            if call.latent is not None
        )
        keep_latents(self._model, takes_latents)
        if self._is_exact:  # in 16 bits, experts may be others
            try:
                self._compare(own, kept, switch, states)
            except ConfigError:
                return shapes
        return kept

    # Runs -------------------------------------------------------------------------------------------------

    def _sequences(self) -> list[list[int]]:
        return [self._ids[: LENGTHS[0]], self._ids[LENGTHS[0] :]]

    def _run(
        self, attention: RecordingAttention, ids: list[int], positions: list[int], keep: list[int] | None = None
    ) -> tuple[torch.Tensor, list[Seen]]:
        """Return the logits of a row of tokens, and the recorded calls of attention."""
        more = {} if keep is None else {"logits_to_keep": torch.tensor(keep, device=self._device)}
        try:
            with attending(attention), keeping(attention.states):
                logits = self._model(
                    input_ids=torch.tensor([ids], device=self._device),
                    position_ids=torch.tensor([positions], device=self._device),
                    use_cache=False,
                    **more,
                ).logits
        except PagesRefusal as error:
            raise refused(self._model, str(error)) from None
        except Exception as error:  # a model's code may raise anything
            if keep is not None:
                raise
            raise refused(self._model, f"it does not run where attention is in pages ({_named_line(error)})") from error
        return logits[0].float(), attention.seen

    def _differ(self, mine: torch.Tensor, other: torch.Tensor, several: float = 1.0) -> bool:
        """Return whether rows differ by more than rounding.

        In 16 bits, only the median row counts, and the limit is 3 % (15 % with `several`): a layer of experts may route
        some tokens differently.
        """
        if mine.shape != other.shape or not bool(torch.isfinite(mine).all()):
            return True
        size = other.norm(dim=-1).clamp_min(1e-20)
        error = (mine - other).norm(dim=-1) / size
        if self._is_exact:
            return float(error.max()) > 1e-4 * several
        return float(error.median()) > 0.03 * min(several, 5.0)


def _takes(model: Any, name: str) -> bool:
    """Return whether a model's forward accepts a keyword, by name or through **kwargs."""
    parameters = signature(model.forward).parameters
    return name in parameters or any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())


def _cache_name(model: Any) -> str:
    """Return the keyword by which a model takes a cache: transformers 5.24 renamed past_key_values to `cache`."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _named_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)[:160]}"
