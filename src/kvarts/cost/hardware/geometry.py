"""Model geometry: memory and work per token, number formats, as a config.json says (read by `model_config.py`).

Counts follow the modules of transformers: the text model of a checkpoint, without vision towers and layers for
multi-token prediction.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec

from kvarts.core.kv.layers import KvGroup, KvLayer, grouped
from kvarts.core.kv.number_formats import dtype_bits, kv_bits, whole_bytes

if TYPE_CHECKING:
    from kvarts.cost.hardware.device import Device

__all__ = [
    "Experts",
    "Extra",
    "Geometry",
    "Latent",
    "Sparse",
    "State",
]


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2): a layer keeps `kv_rank + rope_dim` numbers per token for all heads."""

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int


class Sparse(msgspec.Struct, frozen=True):
    """Sparse attention (DeepSeek V3.2): an indexer scores all tokens, and a layer attends to the `top_tokens` best.

    `num_indexers`: layers with an indexer; the other layers reuse the choice of the layer before them, but for
    `num_dense`, which attend to all tokens (MiniMax M3). An indexer has `num_heads` queries per token, which tensor
    parallelism divides if `is_divided`, and one key of `key_dim` numbers. `kv_dtype`: format of KV on compute
    capability 10, where engines choose another than the model's.
    """

    top_tokens: int
    num_heads: int
    key_dim: int
    num_indexers: int
    kv_dtype: str | None = None
    num_dense: int = 0
    is_divided: bool = False


class Experts(msgspec.Struct, frozen=True):
    """Mixture-of-experts layers: `count` experts of width `intermediate_size`, `per_token` of which process a token.

    `shared_size`: width of the shared experts, which process every token. `num_layers`: number of these layers.
    `latent_size`: width of what experts read and write, where tokens are projected to it; None for the model's.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_size: int
    num_layers: int
    has_bias: bool = False
    has_shared_gate: bool = False
    latent_size: int | None = None


class State(msgspec.Struct, frozen=True):
    """A layer that keeps a state instead of tokens: Mamba, linear attention with a gated delta rule, a convolution.

    `conv_numbers`: inputs kept for the convolution of the next token; `recurrent_numbers`: the state itself. `matrix`:
    numbers in the matrices of the layer; `small`: in its convolution, norm, biases and decays. `kind`: Mamba-2, Mamba,
    a gated delta net, that of Olmo Hybrid, Kimi Delta Attention, or a short convolution. The convolution keeps
    `conv_rows` inputs; each of `num_groups` groups of Mamba-2 has `group_numbers` in a row. A prompt is computed in
    parts of `chunk_size` tokens, after each of which the state is known. `stated_dtype`: the config's
    `mamba_ssm_dtype`.
    """

    conv_numbers: int
    recurrent_numbers: int
    matrix: int
    small: int
    recurrent_dtype: str = "float32"
    kind: Literal["mamba2", "mamba1", "gdn", "olmo_gdn", "kda", "short_conv"] = "mamba2"
    conv_rows: int = 3
    num_groups: int = 0
    group_numbers: int = 0
    chunk_size: int = 64
    stated_dtype: str | None = None

    def local_bytes(self, dtype: str, tensor_parallel: int = 1, num_drafts: int = 0) -> int:
        """Return the bytes of the state of a sequence on one device, as vLLM lays it out.

        Each drafted token adds a row of inputs to the convolution. Devices divide heads and groups; if they do not
        divide the groups, each device has one (vLLM's MambaStateShapeCalculator).
        """
        row = self.conv_numbers // self.conv_rows
        if self.num_groups and self.num_groups % tensor_parallel:
            row += (tensor_parallel - self.num_groups) * self.group_numbers
        conv = row // tensor_parallel * (self.conv_rows + num_drafts)
        bits = conv * dtype_bits(dtype, field="dtype")
        bits += self.recurrent_numbers // tensor_parallel * dtype_bits(self.recurrent_dtype, field="recurrent_dtype")
        return whole_bytes(bits)

    def num_bytes(self, dtype: str) -> int:
        """Return the bytes of the state of a sequence, with its convolution inputs in `dtype`."""
        bits = self.conv_numbers * dtype_bits(dtype, field="dtype")
        return whole_bytes(bits + self.recurrent_numbers * dtype_bits(self.recurrent_dtype, field="recurrent_dtype"))


class Extra(msgspec.Struct, frozen=True):
    """Numbers not counted elsewhere, such as indexers and per-layer embeddings: sums over all layers."""

    matrix: int = 0
    small: int = 0
    embeddings: int = 0


class Geometry(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One decoder model. Sizes are in numbers, not bytes, unless the name contains `bytes`.

    `layers`: the KV layer of each layer. `num_norms`: norms of the model's width in each layer. `mlp_matrices`:
    matrices of a feed-forward layer or an expert, 3 with a gate. `num_mlp_layers`: layers with a feed-forward layer
    that processes every token; by default all layers without experts. `weight_dtype`: format of all matrices except
    those of experts, which have `expert_dtype`; embeddings, norms and biases are kept in `dtype`. `stored`: exceptions
    from these formats: the part (common, experts, head), the format, and the count of numbers. `total_bytes`: bytes of
    the weights, as stated by the index of a checkpoint. `kv_dtype`: format of KV that the checkpoint names. `caches`:
    further KV of layers, next to `layers`. `draft`: the KV of a layer that drafts. `fp8_block`: rows and columns of a
    scale. `notes`: differences from the text of the config. `counts_weights`: False if the number of weights is not
    known. `family`: the config's `model_type`. `max_model_len`: the longest sequence that the config states;
    `most_model_len`: that engines allow.
    """

    name: str
    source: str
    hidden_size: int
    vocab_size: int
    layers: tuple[KvLayer, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    ties_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    gates_attention: bool = False
    num_norms: int = 2
    mlp_matrices: int = 3
    num_mlp_layers: int | None = None
    latent: Latent | None = None
    sparse: Sparse | None = None
    experts: Experts | None = None
    state: State | None = None
    extra: Extra = Extra()
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    expert_dtype: str = "bfloat16"
    stored: tuple[tuple[str, str, int], ...] = ()
    total_bytes: int | None = None
    kv_dtype: str | None = None
    caches: tuple[KvLayer, ...] = ()
    draft: KvLayer | None = None
    fp8_block: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    counts_weights: bool = True
    family: str = ""
    max_model_len: int | None = None
    most_model_len: int | None = None

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The span of each attending layer: the most tokens that it attends to; None for all."""
        return tuple(layer.span for layer in self.layers if layer.attends)

    @cached_property
    def layers_by_window(self) -> dict[int | None, int]:
        """The number of layers with each window or chunk; None is the key of layers that attend to all tokens."""
        counts: dict[int | None, int] = {}
        for window in self.windows:
            counts[window] = counts.get(window, 0) + 1
        return counts

    @property
    def has_spans(self) -> bool:
        """Whether some layer attends only to a window or a chunk."""
        return any(window is not None for window in self.windows)

    @property
    def keeps_less(self) -> bool:
        """Whether some layer keeps less than all tokens."""
        return any(layer.kind not in ("full", "latent") for layer in self.layers) or bool(self.caches)

    @property
    def num_attending_layers(self) -> int:
        """The number of layers that attend to other tokens."""
        return len(self.windows)

    @cached_property
    def attending(self) -> tuple[KvGroup, ...]:
        """Attending layers, grouped by the KV they read, whether their own or that of other layers."""
        return grouped([msgspec.structs.replace(layer, kind="full", sink=0) for layer in self.layers if layer.attends])

    @cached_property
    def _num_sharing_layers(self) -> int:
        return sum(layer.kind == "shared" for layer in self.layers)

    @cached_property
    def num_state_layers(self) -> int:
        """The layers that keep a state."""
        return sum(layer.kind == "state" for layer in self.layers)

    # Parameters -------------------------------------------------------------------------------------------

    @cached_property
    def attention_matrix(self) -> int:
        """Numbers in the matrices of one attention layer."""
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            per_head = 3 if self.gates_attention else 2
            return hidden * self.head_dim * (per_head * self.num_heads + 2 * self.num_kv_heads)
        q_dim = self.num_heads * (latent.nope_dim + latent.rope_dim)
        query = hidden * q_dim if latent.q_rank is None else latent.q_rank * (hidden + q_dim)
        keys = hidden * (latent.kv_rank + latent.rope_dim)
        values = latent.kv_rank * self.num_heads * (latent.nope_dim + latent.v_dim)
        return query + keys + values + self.num_heads * latent.v_dim * hidden

    @cached_property
    def dense_matrix(self) -> int:
        """Numbers in the matrices of one feed-forward layer that processes every token: up, down, and mostly a gate."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @cached_property
    def expert_matrix(self) -> int:
        """Numbers in the matrices of one expert."""
        if self.experts is None:
            return 0
        width = self.experts.latent_size or self.hidden_size
        return self.mlp_matrices * width * self.experts.intermediate_size

    @cached_property
    def num_dense_layers(self) -> int:
        """Layers with a feed-forward layer and without experts."""
        if self.num_mlp_layers is not None:
            return self.num_mlp_layers
        return self.num_layers - (0 if self.experts is None else self.experts.num_layers)

    @cached_property
    def common_matrix(self) -> int:
        """Numbers in matrices that multiply every token, without the output head and the experts."""
        numbers = self.num_attending_layers * self.attention_matrix + self.num_dense_layers * self.dense_matrix
        numbers -= self._num_sharing_layers * self.hidden_size * self.head_dim * 2 * self.num_kv_heads
        numbers += self.extra.matrix
        if self.state is not None:
            numbers += self.num_state_layers * self.state.matrix
        if self.experts is not None:
            shared = self.mlp_matrices * self.hidden_size * self.experts.shared_size
            shared += 2 * self.hidden_size * (self.experts.latent_size or 0)
            numbers += self.experts.num_layers * (shared + self.hidden_size * self.experts.count)
        return numbers

    @cached_property
    def head_matrix(self) -> int:
        """Numbers in the output head, which is the embedding if the two are tied."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def _embeddings(self) -> int:
        return self.head_matrix * (1 if self.ties_embeddings else 2) + self.extra.embeddings

    @cached_property
    def num_small(self) -> int:
        """Numbers in norms, biases, sinks and convolutions."""
        hidden, latent, experts = self.hidden_size, self.latent, self.experts
        layer = 0
        if latent is not None:
            layer += latent.kv_rank + (latent.q_rank or 0)
        if self.has_qkv_bias:
            layer += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        layer += hidden * self.has_output_bias + 2 * self.head_dim * self.has_qk_norm + self.num_heads * self.has_sinks
        numbers = self.num_attending_layers * layer + self.num_layers * self.num_norms * hidden + hidden
        numbers += self.extra.small - self._num_sharing_layers * self.head_dim * self.has_qk_norm
        if self.state is not None:
            numbers += self.num_state_layers * self.state.small
        if self.has_mlp_bias:
            numbers += self.num_dense_layers * (2 * self.intermediate_size + hidden)
        if experts is not None and experts.has_bias:
            numbers += experts.num_layers * experts.count * (2 * experts.intermediate_size + hidden + 1)
        if experts is not None and experts.has_shared_gate:
            numbers += experts.num_layers * hidden
        return numbers

    @cached_property
    def num_parameters(self) -> int:
        """The number of weights of the text model."""
        experts = 0 if self.experts is None else self.experts.num_layers * self.experts.count * self.expert_matrix
        return self._embeddings + self.common_matrix + experts + self.num_small

    @cached_property
    def num_active_parameters(self) -> int:
        """The number of weights used for one token: all except those of experts that do not process it."""
        if self.experts is None:
            return self.num_parameters
        unseen = self.experts.count - self.experts.per_token
        return self.num_parameters - self.experts.num_layers * unseen * self.expert_matrix

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights: those stated by the checkpoint, else counted and rounded up."""
        if self.total_bytes is not None:
            return self.total_bytes
        experts = 0 if self.experts is None else self.experts.num_layers * self.experts.count * self.expert_matrix
        bits = (self._embeddings + self.num_small) * dtype_bits(self.dtype, field="dtype")
        bits += self.common_matrix * dtype_bits(self.weight_dtype, field="weight_dtype")
        bits += experts * dtype_bits(self.expert_dtype, field="expert_dtype")
        return whole_bytes(bits + sum(map(self._other_bits, ("common", "experts", "head"))))

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of the weights of experts, rounded up to whole bytes. Part of `weight_bytes`."""
        experts = 0 if self.experts is None else self.experts.num_layers * self.experts.count * self.expert_matrix
        return whole_bytes(experts * dtype_bits(self.expert_dtype, field="expert_dtype") + self._other_bits("experts"))

    def _other_bits(self, part: str) -> Fraction:
        """Return how many bits more a part takes than if all of its numbers had its format."""
        own = {"common": self.weight_dtype, "experts": self.expert_dtype, "head": self.dtype}[part]
        usual = dtype_bits(own, field="weight_dtype")
        return sum(
            (count * (dtype_bits(name, field="weight_dtype") - usual) for of, name, count in self.stored if of == part),
            Fraction(0),
        )

    def stored_as(self, weight_dtype: str | None) -> Geometry:
        """Return the model with all matrices in `weight_dtype`; unchanged if None."""
        if weight_dtype is None:
            return self
        dtype_bits(weight_dtype, field="weight_dtype")
        return msgspec.structs.replace(
            self, weight_dtype=weight_dtype, expert_dtype=weight_dtype, stored=(), total_bytes=None
        )

    def on(self, device: Device | None) -> Geometry:
        """Return the model as engines keep its KV on a device; without one, as on Hopper.

        Kernels of compute capability 10 keep fp8 latents of sparse attention without scales of their own, and vLLM
        keeps the KV of GLM-5 in fp8 there by default (0.32, model_executor/models/config.py).
        """
        if device is None or device.capability != 10 or self.sparse is None:
            return self
        layers = tuple(
            msgspec.structs.replace(layer, packed_bytes=None) if layer.own_dtype is None else layer
            for layer in self.layers
        )
        return msgspec.structs.replace(self, layers=layers, kv_dtype=self.kv_dtype or self.sparse.kv_dtype)

    # KV ---------------------------------------------------------------------------------------------------

    @cached_property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The KV groups: layers that keep the same tokens, in the order of their first layers."""
        return grouped(self.layers + self.caches)

    def kept_as(self, kv_dtype: str | None) -> str:
        """Return the format of KV: `kv_dtype`, else that of the checkpoint, else that of the model."""
        return self.dtype if kv_dtype == "auto" else kv_dtype or self.kv_dtype or self.dtype

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence in all layers, independent of its length."""
        return sum(layer.state_bytes for layer in self.layers)

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """Return the bytes of KV per token if every layer keeps every token. `kv_dtype`: default: the model's."""
        kept = self.kept_as(kv_dtype)
        return whole_bytes(sum((group.token_bits(kept) for group in self.kv_groups), Fraction(0)))

    def expanded_kv_bytes_per_token(self, kv_dtype: str | None = None) -> int | None:
        """Return the bytes per token if latent KV is stored as its expanded keys and values.

        Models that run in kvarts do so; keys and values then both have the larger of their two sizes. None without a
        latent.
        """
        latent = self.latent
        if latent is None:
            return None
        head_dim = max(latent.nope_dim + latent.rope_dim, latent.v_dim)
        bits, scale_bits = kv_bits(self.kept_as(kv_dtype))
        return whole_bytes(self.num_attending_layers * self.num_heads * 2 * (head_dim * bits + scale_bits))

    def kv_bytes(self, num_tokens: int, kv_dtype: str | None = None) -> int:
        """Return the bytes kept of a sequence while the last of its `num_tokens` tokens is computed."""
        bits = sum(
            (group.layer.num_tokens(num_tokens) * group.token_bits(self.kept_as(kv_dtype)) for group in self.kv_groups),
            Fraction(0),
        )
        return whole_bytes(bits) + (self.state_bytes if num_tokens else 0)
