"""DecoderSpec: all that tells one decoder from another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.native.elementwise import PlainActivation
from inflight.native.linear import Activation


class NormKind(Enum):
    RMS = "rms"
    LAYER = "layer"
    """LayerNorm: the mean is taken out first."""


class QkNorm(Enum):
    """What one RMSNorm of the queries, and one of the keys, spans."""

    NONE = "none"
    EACH_HEAD = "each head"
    WHOLE_ROW = "whole row"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Where a layer has norms, by their names in the checkpoint; None: there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    """Of what attention adds to the residual."""
    before_mlp: str | None = None
    """May be the one before attention."""
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a checkpoint calls its tensors. Those of a layer stand after ``layers``.<its number>."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    qkv: str | None = None
    """After the name of the attention: one tensor in place of q_proj, k_proj and v_proj."""
    output: str = "o_proj"
    mlp: str = "mlp"
    """Of a layer without experts."""
    gate: str = "gate_proj"
    """This and the next three stand after the name of an MLP."""
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    """One tensor in place of ``gate`` and ``up``."""
    experts: str = "mlp.experts"
    """An expert's number follows, and then it is an MLP."""
    router: str = "mlp.gate"
    shared_expert: str = "mlp.shared_expert"
    shared_expert_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Dimension i of a head turns with i + n, by position * inverse_frequencies[i], where n is the
    number of frequencies; the dimensions from 2n on stay as they are."""

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    """Multiplies the cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation | PlainActivation
    is_gated: bool = True
    has_bias: bool = False

    @property
    def gated_activation(self) -> Activation:
        """Where there is a gate."""
        assert self.is_gated and (self.activation == "silu" or self.activation == "gelu_tanh")
        return self.activation

    @property
    def plain_activation(self) -> PlainActivation:
        """Where there is none."""
        assert not self.is_gated and self.activation != "silu"
        return self.activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Of a token, the experts with the largest router logits run, and what they give is added up,
    each times its weight: a softmax of the logits."""

    num_experts: int
    num_experts_per_token: int
    mlp: MlpSpec
    """Of each expert; gated, without biases."""
    is_softmax_of_chosen: bool
    """The softmax is over the chosen experts alone: their weights have the sum 1."""

    def __post_init__(self) -> None:
        assert 1 <= self.num_experts_per_token <= self.num_experts
        assert self.mlp.is_gated and not self.mlp.has_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    sliding_window: int | None
    """As in ``AttentionRules``."""
    rope: RopeSpec | None
    """None: queries and keys carry no position."""
    mlp: MlpSpec | None
    """Beside experts it is the shared expert, which every token takes, times the sigmoid of a
    router logit of its own. None: there are only experts."""
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A layer adds to the residual stream first attention and then its feed-forward part, the MLP
    or the experts:

    h += residual_multiplier * after_attention(attention(before_attention(h)))
    h += residual_multiplier * after_mlp(feed_forward(before_mlp(h)))

    (where ``is_parallel`` with the same h in both), and

    logits = softcap(head(norm(h)) * logits_multiplier), softcap(x) = c * tanh(x / c).
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    names: TensorNames = TensorNames()
    norms: NormNames
    norm_kind: NormKind = NormKind.RMS
    norm_epsilon: float
    norm_offset: float = 0.0
    """Every norm multiplies by weight + norm_offset."""
    norm_bias: bool = False
    """After that LayerNorms add a bias."""
    is_parallel: bool = False
    attention_scale: float
    attention_softcap: float | None = None
    qk_norm: QkNorm = QkNorm.NONE
    has_interleaved_rope: bool = False
    """In the checkpoint dimension 2i of a head turns with 2i + 1. Loading puts queries and keys
    into the order of ``RopeSpec``, which changes none of their products."""
    has_qkv_by_head: bool = False
    """The checkpoint's one tensor has query, key and value of one head after those of another."""
    qkv_bias: bool = False
    output_bias: bool = False
    head_bias: bool = False
    has_tied_head: bool
    """The head is the embedding table."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    def __post_init__(self) -> None:
        # forward.py keeps h / residual_multiplier, which only a norm makes good.
        reads_through_norms = self.norms.before_attention and self.norms.before_mlp
        assert self.residual_multiplier == 1.0 or reads_through_norms
        # logits_multiplier is in the weights of the last norm, before the head's bias.
        assert self.logits_multiplier == 1.0 or not self.head_bias
        assert self.norm_kind is NormKind.LAYER or not self.norm_bias
        assert not self.has_qkv_by_head or self.num_heads == self.num_kv_heads
        assert not self.has_interleaved_rope or self.names.qkv is None
        assert not self.has_interleaved_rope or self.qk_norm is QkNorm.NONE
        # The buffers of rows.py are made for one kind of expert layer.
        mixed = [layer for layer in self.layers if layer.experts is not None]
        assert len({(layer.experts, layer.mlp) for layer in mixed}) <= 1
        assert all(layer.mlp is not None for layer in self.layers if layer.experts is None)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

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
