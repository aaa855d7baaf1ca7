"""The device runner on the kernels, which run under Triton's interpreter: the same logits as
transformers' plain forward, through contexts, generations and replayed graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from inflight.api.config import InflightConfig  # noqa: E402
from inflight.model.device.kernel_ops import KernelOps  # noqa: E402
from inflight.model.device.load import load_device_runner  # noqa: E402
from inflight.model.device.plain_runtime import PlainRuntime  # noqa: E402
from inflight.model.device.proof import prove_kernels  # noqa: E402
from inflight.model.probe_course import THOROUGH  # noqa: E402
from tests.fakes.tiny_models import save_tiny_checkpoint, tiny_config  # noqa: E402
from tests.numeric.decoder_cases import (  # noqa: E402
    TOKENS_PER_BLOCK,
    packed_logits,
    plain_logits,
    random_sequences,
)

pytestmark = pytest.mark.interpreter

TOLERANCE = 1e-4


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "phi", "mixtral", "qwen2_moe"])
def test_packed_equals_plain(model_type: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if model_type == "gemma2":
        changes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    directory = save_tiny_checkpoint(tmp_path, tiny_config(model_type, **changes))
    config = InflightConfig(
        dtype="fp32",
        max_num_tokens=64,
        max_batch_size=2,
        tokens_per_block=TOKENS_PER_BLOCK,
        attention_backend="triton",
    )
    runner = load_device_runner(directory, config, PlainRuntime(torch.device("cpu")))
    assert isinstance(runner.decoder.ops, KernelOps)

    def fill(value: float) -> None:
        with torch.inference_mode():
            runner.kv_cache.storage.fill_(value)

    sequences = [random_sequences()[0][:24], random_sequences()[1]]
    got = packed_logits(runner, sequences, fill, prompt_lengths=(19, 13))
    assert np.abs(got - plain_logits(directory, sequences)).max() <= TOLERANCE


def test_kernels_pass_the_proof_of_a_built_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows and iterations as prove the kernels of a CPU; other tiny models have too few
    positions for them."""
    proofs: list[float] = []

    def note(*arguments: Any) -> float:
        proofs.append(prove_kernels(*arguments))
        return proofs[-1]

    monkeypatch.setattr("inflight.model.device.load.prove_kernels", note)
    model = tiny_config("llama", num_hidden_layers=1, max_position_embeddings=THOROUGH.max_seq_len)
    config = InflightConfig(dtype="fp32", max_num_tokens=64, attention_backend="triton")
    load_device_runner(
        save_tiny_checkpoint(tmp_path, model), config, PlainRuntime(torch.device("cpu"))
    )
    assert len(proofs) == 1 and 0 < proofs[0] < TOLERANCE


def test_blocks_are_copied_and_come_back_as_they_were(tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(tmp_path, tiny_config("llama", num_hidden_layers=1))
    config = InflightConfig(
        dtype="bf16", max_num_tokens=64, max_batch_size=4, tokens_per_block=16,
        cuda_graph_mode=False, attention_backend="triton", kv_cache_host_memory_bytes=1 << 20,
    )  # fmt: skip
    runner = load_device_runner(directory, config, PlainRuntime(torch.device("cpu")))
    runner.allocate_kv_cache(6, 16)
    with torch.inference_mode():
        runner.kv_cache.storage.normal_()
    before = [runner.read_blocks(np.array([i], dtype=np.int32)) for i in range(6)]
    exchanged = np.array([4, 1], dtype=np.int32)
    runner.copy_blocks(exchanged, exchanged[::-1].copy())
    runner.write_blocks(np.array([0], dtype=np.int32), before[5])
    after = [runner.read_blocks(np.array([i], dtype=np.int32)) for i in range(6)]
    for got, source in zip(after, (5, 4, 2, 3, 1, 5), strict=True):
        np.testing.assert_array_equal(got, before[source])
