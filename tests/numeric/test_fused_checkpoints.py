"""Which checkpoints the fused runner takes, and what it says of the others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError, ConfigError
from inflight.model.architectures import PROVED
from inflight.model.fused.families import FUSED_MODEL_TYPES, can_fuse, decoder_spec
from inflight.model.fused.load import build_fused_runner, read_hf_config
from inflight.model.fused.spec import QkNorm
from inflight.model.fused.tensors import CheckpointTensors
from tests.fakes.tiny_models import SLIDING_WINDOW, tiny_checkpoint, tiny_config

pytestmark = pytest.mark.numeric

FP32 = InflightConfig(dtype="fp32")


@pytest.mark.parametrize("model_type", sorted(PROVED))
def test_known_types_fuse_and_all_others_say_why_not(model_type: str) -> None:
    reason = can_fuse(tiny_config(model_type))
    if model_type in FUSED_MODEL_TYPES:
        assert reason is None
    else:
        assert reason == f"the fused runner does not know {model_type}"


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("llama", {"hidden_act": "relu"}, "no gated activation relu"),
        ("phi", {"hidden_act": "silu"}, "no activation silu"),
        ("phi", {"qk_layernorm": True}, "queries and keys have LayerNorms"),
        ("cohere", {"use_qk_norm": True}, "queries and keys have LayerNorms"),
        ("olmoe", {"clip_qkv": 8.0}, "queries, keys and values are clipped"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts run a token"),
        ("llama", {"head_dim": 24}, r"multiples of 16 .* not \(64, 96, 24\)"),
        ("llama", {"intermediate_size": 100}, r"multiples of 16 .* not \(64, 100, 16\)"),
        ("llama", {"head_dim": 528}, "heads of at most 512"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads do not share 3 KV heads evenly"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attend to later ones"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "no rope of type dynamic",
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "no rope of type longrope",
        ),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": 8},
            "full and sliding attention only",
        ),
    ],
)
def test_what_no_operation_computes_is_named(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    found = can_fuse(tiny_config(model_type, **changes))
    assert found is not None and re.search(reason, found)


def test_a_spec_holds_what_the_class_fixes() -> None:
    gemma = decoder_spec(tiny_config("gemma3_text"))
    assert [layer.sliding_window for layer in gemma.layers] == [
        SLIDING_WINDOW,
        None,
        SLIDING_WINDOW,
    ]
    ropes = [layer.rope for layer in gemma.layers]
    assert ropes[0] == ropes[2] != ropes[1]
    assert (gemma.norm_offset, gemma.qk_norm) == (1.0, QkNorm.EACH_HEAD)
    assert gemma.embedding_multiplier == 8.0  # the root of 64
    assert gemma.has_tied_head and gemma.attention_softcap is None

    olmo = decoder_spec(tiny_config("olmo2"))
    assert olmo.norms.before_attention is None and olmo.qk_norm is QkNorm.WHOLE_ROW
    smollm = decoder_spec(tiny_config("smollm3"))
    assert [layer.rope is None for layer in smollm.layers] == [False, True, False]
    assert decoder_spec(tiny_config("qwen2")).qkv_bias


def test_a_spec_says_which_layers_have_experts() -> None:
    mixed = decoder_spec(
        tiny_config("qwen2_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    )
    assert [layer.experts is not None for layer in mixed.layers] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    sizes = [layer.mlp.intermediate_size for layer in mixed.layers if layer.mlp is not None]
    assert sizes == [96, 32, 96, 96, 96, 32]  # an MLP, or the shared expert
    mixtral = decoder_spec(tiny_config("mixtral"))
    assert all(layer.mlp is None for layer in mixtral.layers)
    experts = mixtral.layers[0].experts
    assert experts is not None and experts.is_softmax_of_chosen
    assert (experts.num_experts, experts.num_experts_per_token) == (4, 2)


def test_weights_of_a_missing_expert_are_named(tmp_path: Path) -> None:
    file = tiny_checkpoint(tmp_path, "mixtral") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"layers.1.block_sparse_moe.experts.3.w2.weight are"):
        build_fused_runner(tmp_path, FP32, None)


def test_other_architectures_and_dtypes_are_refused(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match="runner: fused: .* does not know gpt2"):
        build_fused_runner(tmp_path / "gpt2", FP32, None)
    tiny_config("bloom").save_pretrained(tmp_path / "bloom")
    with pytest.raises(CheckpointError, match="architecture bloom is not served"):
        build_fused_runner(tmp_path / "bloom", FP32, None)
    with pytest.raises(ConfigError, match="dtype: fp16"):
        build_fused_runner(tmp_path / "bloom", InflightConfig(dtype="fp16"), None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is not understood"):
        read_hf_config(tmp_path)


def split_weights(directory: Path) -> None:
    """The checkpoint's one file as two and an index, as large checkpoints come."""
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    weight_map = {}
    for i, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-{i % 2}.safetensors"
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_weights_in_several_files_are_found(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    split_weights(tmp_path)
    tensors = CheckpointTensors(tmp_path)
    for name, tensor in expected.items():
        assert torch.equal(tensors.tensor(name, *tensor.shape), tensor)
    build_fused_runner(tmp_path, FP32, None)


def test_a_map_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "other")
    weight_map = {"model.norm.weight": "other/model.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    for content in ({"weight_map": weight_map}, {"weight_map": []}, {}):
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="weight_map must map"):
            CheckpointTensors(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": torch.ones(65)}, file)
    with pytest.raises(CheckpointError, match=r"model.norm.weight is torch.float32 of \(65,\)"):
        build_fused_runner(tmp_path, FP32, None)
    save_file({**tensors, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    with pytest.raises(CheckpointError, match="model.norm.weight is torch.int8"):
        build_fused_runner(tmp_path, FP32, None)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="layers.1.mlp.up_proj.weight are missing"):
        build_fused_runner(tmp_path, FP32, None)
    file.write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        build_fused_runner(tmp_path, FP32, None)
    file.unlink()
    with pytest.raises(CheckpointError, match="has no safetensors weights"):
        build_fused_runner(tmp_path, FP32, None)


def test_the_embedding_table_of_the_same_dtype_is_not_copied(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    runner = build_fused_runner(directory, FP32, None)
    address = runner.decoder.weights.embedding.data_ptr()
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0] for line in maps if "model.safetensors" in line]
    ends = [[int(end, 16) for end in span.split("-")] for span in spans]
    assert any(start <= address < end for start, end in ends)
