"""DecoderSpec: all that tells one decoder of the Llama kind from another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.native.linear import Activation


class QkNorm(Enum):
    """What one RMSNorm of the queries, and one of the keys, spans."""

    NONE = "none"
    EACH_HEAD = "each head"
    WHOLE_ROW = "whole row"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Where a layer has RMSNorms, by their names in the checkpoint; None: there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    """Of what attention adds to the residual."""
    before_mlp: str | None = None
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Dimension i of a head turns with i + n, by position * inverse_frequencies[i], where n is the
    number of frequencies; the dimensions from 2n on stay as they are."""

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    """Multiplies the cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    sliding_window: int | None
    """As in ``AttentionRules``."""
    rope: RopeSpec | None
    """None: queries and keys carry no position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A layer adds to the residual stream first attention and then a gated MLP:

    h += residual_multiplier * after_attention(attention(before_attention(h)))
    h += residual_multiplier * after_mlp(down(activation(gate(x)) * up(x))), x = before_mlp(h)

    and logits = softcap(head(norm(h)) * logits_multiplier), softcap(x) = c * tanh(x / c).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    activation: Activation
    norms: NormNames
    norm_epsilon: float
    attention_scale: float
    norm_offset: float = 0.0
    """Every RMSNorm multiplies by weight + norm_offset."""
    qk_norm: QkNorm = QkNorm.NONE
    attention_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_tied_head: bool
    """The head is the embedding table."""
    has_fused_names: bool = False
    """The checkpoint itself keeps query, key and value in one tensor, and gate and up in one."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    def __post_init__(self) -> None:
        # forward.py keeps h / residual_multiplier, which only an RMSNorm makes good.
        reads_through_norms = self.norms.before_attention and self.norms.before_mlp
        assert self.residual_multiplier == 1.0 or reads_through_norms

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the keys; as many again of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.query_size + 2 * self.kv_size
