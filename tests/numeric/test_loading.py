"""load_runner on folders that are right, and on every kind of folder that is not."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError
from inflight.model import factory
from inflight.model.architectures import PROVED
from inflight.model.attention import AttentionRules
from inflight.model.dtypes import DTYPES, choose_dtype
from inflight.model.factory import load_runner
from inflight.model.loading import load_model
from inflight.model.packed_model import PackedModel
from inflight.model.probe import probe
from inflight.model.probe_course import SHORT, THOROUGH
from inflight.model.torch_attention import TorchAttention
from tests.fakes.tiny_models import save_tiny_checkpoint, tiny_checkpoint, tiny_config

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


def config(**values: Any) -> InflightConfig:
    defaults = {
        "dtype": "fp32",
        "num_threads": 1,
        "runner": "hf",
        "attention_backend": "torch",
    }
    return InflightConfig(**(defaults | values))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("dtype", "bytes_per_element"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_the_spec_says_what_was_loaded(dtype: str, bytes_per_element: int, tmp_path: Path) -> None:
    spec = load_runner(tiny_checkpoint(tmp_path), config(dtype=dtype)).spec
    assert spec.dtype == dtype
    # 3 layers of 2 KV heads, K and V of 16 elements each.
    assert spec.kv_bytes_per_token == 3 * 2 * (16 + 16) * bytes_per_element
    assert (spec.vocab_size, spec.max_position_embeddings, spec.num_layers) == (256, 128, 3)
    assert spec.supported_tokens_per_block == ()
    assert spec.device == str(factory.choose_device())


def test_layers_may_differ_in_the_size_of_k_and_v(tmp_path: Path) -> None:
    spec = load_runner(tiny_checkpoint(tmp_path, "deepseek_v3"), config()).spec
    # Multi-head latent attention unfolded: 4 heads with K of 16 + 8 elements and V of 12.
    assert spec.kv_bytes_per_token == 3 * 4 * (24 + 12) * 4


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the flags of x86 processors")
def test_auto_is_bf16_in_torch_where_the_processor_computes_it() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.split() for line in lines if line.startswith("flags"))
    expected = torch.bfloat16 if "avx512_bf16" in flags else torch.float32
    assert choose_dtype("auto", CPU) is expected


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_named_type_is_taken_whatever_the_hardware(name: str) -> None:
    assert choose_dtype(name, CPU) is DTYPES[name]


def test_threads_follow_the_configuration(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        load_runner(tiny_checkpoint(tmp_path), config(num_threads=3))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_dir: .* has no config\.json"):
        load_runner(tmp_path, config())


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no_such_model"}', "{}"])
def test_a_configuration_that_is_not_understood(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not understood: \S") as caught:
        load_runner(tmp_path, config())
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}})
    )
    with pytest.raises(CheckpointError, match="not understood"):
        load_runner(tmp_path, config())
    assert not (tmp_path / "ran").exists()


def test_no_weights(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="weights cannot be loaded: .*safetensors"):
        load_runner(tmp_path, config())


def test_weights_that_are_cut_short(tmp_path: Path) -> None:
    weights = tiny_checkpoint(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"weights cannot be loaded: \S"):
        load_runner(tmp_path, config())


def test_a_missing_weight_is_named_and_not_made_up(tmp_path: Path) -> None:
    weights = tiny_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    lost = "model.layers.1.self_attn.k_proj.weight"
    del tensors[lost]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 weights are missing, among them {lost}"):
        load_runner(tmp_path, config())


def test_weights_of_another_shape(tmp_path: Path) -> None:
    edit_config(tiny_checkpoint(tmp_path), intermediate_size=95)
    with pytest.raises(CheckpointError, match=r"weights cannot be loaded: \S"):
        load_runner(tmp_path, config())


def test_a_window_that_the_interface_is_not_told_of_is_found_out(tmp_path: Path) -> None:
    layers = ["full_attention", "sliding_attention", "full_attention"]
    edit_config(tiny_checkpoint(tmp_path), layer_types=layers, sliding_window=8)
    with pytest.raises(CheckpointError, match="layer 1 does not pass its sliding window"):
        load_runner(tmp_path, config())


class ScaledAttention(TorchAttention):
    """A backend with a plain fault: scores are a third too large."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
    ) -> torch.Tensor:
        return super().attend(layer, query * 1.33, key, value, rules)


class ForgetfulAttention(TorchAttention):
    """A backend with a fault that only chunks and generations show: iterations forget others."""

    def begin_iteration(self, inputs: Any) -> None:
        for keys, values in self.storage:
            keys.zero_()
            values.zero_()
        super().begin_iteration(inputs)


class ShortTile(TorchAttention):
    """A backend with a fault that only many rows show: the one behind the 32nd is the first's."""

    def attend(self, *arguments: Any) -> torch.Tensor:
        attended = super().attend(*arguments)
        attended[32:33] = attended[:1]
        return attended


def tiny_packed(
    directory: Path, dtype: torch.dtype, num_positions: int, model_type: str = "llama"
) -> PackedModel:
    config = tiny_config(model_type, max_position_embeddings=num_positions)
    save_tiny_checkpoint(directory, config)
    return PackedModel(load_model(directory, dtype=dtype, device=CPU))


@pytest.mark.parametrize("num_positions", [SHORT.max_seq_len, THOROUGH.max_seq_len])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", [ScaledAttention, ForgetfulAttention])
def test_the_probe_finds_wrong_attention(
    fault: type[TorchAttention], dtype: torch.dtype, num_positions: int, tmp_path: Path
) -> None:
    model = tiny_packed(tmp_path, dtype, num_positions)
    probe(model, TorchAttention(dtype, CPU))
    with pytest.raises(CheckpointError, match="architecture llama .*packed and plain logits"):
        probe(model, fault(dtype, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_wrong_row_among_many_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    probe(tiny_packed(tmp_path / "few", dtype, SHORT.max_seq_len), ShortTile(dtype, CPU))
    model = tiny_packed(tmp_path / "many", dtype, THOROUGH.max_seq_len)
    with pytest.raises(CheckpointError, match="architecture llama is not served: .*logits"):
        probe(model, ShortTile(dtype, CPU))


@pytest.mark.parametrize("model_type", sorted(PROVED))
def test_what_is_proved_passes_the_thorough_probe_in_bf16(model_type: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    model = tiny_packed(tmp_path, dtype, THOROUGH.max_seq_len, model_type)
    probe(model, TorchAttention(dtype, CPU))


def test_experts_are_told_from_what_the_classes_are_made_of(tmp_path: Path) -> None:
    found = {
        name: tiny_packed(tmp_path / name, torch.float32, 16, name).has_experts
        for name in ("llama", "gpt2", "mixtral", "qwen2_moe", "olmoe", "gpt_oss", "deepseek_v3")
    }
    assert [name for name, has in found.items() if not has] == ["llama", "gpt2"]


def test_the_probe_finds_layers_that_see_more_than_the_interface_says(tmp_path: Path) -> None:
    """A bidirectional encoder is listed by transformers as a causal language model."""
    directory = save_tiny_checkpoint(tmp_path, tiny_config("bert"))
    with pytest.raises(CheckpointError, match="architecture bert .*packed and plain logits"):
        load_runner(directory, config())
