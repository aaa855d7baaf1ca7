"""Attention on FlashInfer, with a fake of the library and a CPU in the GPU's place."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from inflight.api.config import InflightConfig  # noqa: E402
from inflight.batch import Phase  # noqa: E402
from inflight.errors import ConfigError  # noqa: E402
from inflight.kernels.launch import default_launches  # noqa: E402
from inflight.kernels.tuning import AttentionShape  # noqa: E402
from inflight.model.device import flashinfer_attention as adapter  # noqa: E402
from inflight.model.device.flashinfer_attention import (  # noqa: E402
    BOTH_PHASES,
    FlashInferAttention,
    Phases,
    ScoreKind,
    unsupported_reason,
    workspace_bytes,
)
from inflight.model.device.flashinfer_ops import FlashInferOps  # noqa: E402
from inflight.model.device.load import load_device_runner  # noqa: E402
from inflight.model.device.ops import LayerRules  # noqa: E402
from inflight.model.device.plain_runtime import PlainRuntime  # noqa: E402
from inflight.model.device.rows import RowBuffer  # noqa: E402
from inflight.model.device.runner import DeviceRunner  # noqa: E402
from inflight.model.device.staging import RowLimits  # noqa: E402
from inflight.model.device.torch_ops import TorchOps  # noqa: E402
from inflight.model.fused.families import decoder_spec  # noqa: E402
from inflight.model.runner import PackedInputs  # noqa: E402
from tests.fakes import fake_flashinfer  # noqa: E402
from tests.fakes.tiny_models import SLIDING_WINDOW, save_tiny_checkpoint, tiny_config  # noqa: E402
from tests.gpu import flashinfer as stage  # noqa: E402
from tests.gpu.kernel_works import SMALL  # noqa: E402
from tests.gpu.rows import Outcome  # noqa: E402
from tests.interpreter.case import Case  # noqa: E402
from tests.interpreter.flashinfer_cases import flashinfer_cases  # noqa: E402
from tests.numeric.device_driver import context, generation, logits_of, packed  # noqa: E402

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
SHAPE = AttentionShape(
    num_heads=6, num_kv_heads=2, head_dim=64, tokens_per_block=16, dtype=torch.float16
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(adapter, "DEVICE_TYPES", ("cuda", "cpu"))


@pytest.mark.parametrize("case", tuple(flashinfer_cases()), ids=lambda case: case.name)
def test_equals_the_torch_reference(case: Case) -> None:
    assert case.run(CPU) <= 1.0


SEQUENCES = ((5, 21), (1, 1), (16, 16), (1, 40), (1, 17), (1, 1))
"""(rows, tokens with them); the first three are contexts."""


def random_inputs() -> PackedInputs:
    rows, lengths = (np.array(numbers, dtype=np.int32) for numbers in zip(*SEQUENCES, strict=True))
    positions = np.concatenate([np.arange(n - m, n) for m, n in SEQUENCES])
    tables = np.random.default_rng(4).permutation(18).astype(np.int32).reshape(6, 3)
    of_row = np.repeat(np.arange(6), rows)
    return PackedInputs(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        position_ids=positions,
        slot_mapping=tables[of_row, positions // 16].astype(np.int64) * 16 + positions % 16,
        cu_seqlens_q=np.append(0, rows.cumsum()).astype(np.int32),
        context_lens=lengths,
        block_tables=tables,
        logits_indices=np.arange(len(positions)),
        num_context_sequences=3,
        num_context_tokens=int(rows[:3].sum()),
    )


def rules(**changes: Any) -> LayerRules:
    values = {
        "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "scale": 0.1, "softcap": None,
        "sliding_window": None, "cos_sin": None, "q_norm": None, "k_norm": None,
        "norm_epsilon": 1e-5,
    }  # fmt: skip
    return LayerRules(**values | changes)


CONTEXTS = Phases(contexts=True, generations=False)
GENERATIONS = Phases(contexts=False, generations=True)
WINDOW_AND_SOFTCAP = {"sliding_window": 7, "softcap": 1.5}


@pytest.mark.parametrize(
    ("phases", "changes"),
    [
        (BOTH_PHASES, {}),
        (BOTH_PHASES, WINDOW_AND_SOFTCAP),
        (CONTEXTS, WINDOW_AND_SOFTCAP),
        (GENERATIONS, WINDOW_AND_SOFTCAP),
        (BOTH_PHASES, {"sinks": torch.linspace(-1.0, 2.0, 6)}),
    ],
    ids=["both", "both with rules", "contexts", "generations", "sinks stay with our kernels"],
)
def test_a_layer_attends_as_the_reference_does(phases: Phases, changes: dict[str, Any]) -> None:
    runtime, own = PlainRuntime(CPU), rules(**changes)
    config = tiny_config(
        "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=64
    )
    spec = decoder_spec(config)
    limits = RowLimits(
        max_num_tokens=40, max_batch_size=6, max_blocks_per_sequence=3, tokens_per_block=16
    )
    with runtime.computing():
        generator = torch.Generator().manual_seed(1)
        storage = torch.randn(2, 18, 2, 16, 64, generator=generator).half()
        qkv = torch.randn(25, 10 * 64, generator=generator).half()
        attention = FlashInferAttention(SHAPE, [ScoreKind.of(own)], runtime)
        ops = FlashInferOps(spec, default_launches(64, torch.float16), CPU, attention, phases)
        rows = RowBuffer(limits, runtime).take(random_inputs())
        caches = storage.clone(), storage.clone()
        got, want = (
            some.attend(qkv, cache, rows, own)
            for some, cache in zip((ops, TorchOps()), caches, strict=True)
        )
    assert torch.equal(*caches)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def runner_of(directory: Path, model_type: str = "llama", **keys: Any) -> DeviceRunner:
    changes: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 64}
    if model_type == "gemma2":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    values = {
        "dtype": "fp16", "max_num_tokens": 64, "max_batch_size": 2, "max_seq_len": 64,
        "tokens_per_block": 16, "attention_backend": "flashinfer",
        "cache_dir": str(directory / "kept"),
    }  # fmt: skip
    checkpoint = save_tiny_checkpoint(directory, tiny_config(model_type, **changes))
    config = InflightConfig.model_validate(values | keys)
    runner = load_device_runner(checkpoint, config, PlainRuntime(CPU))
    runner.allocate_kv_cache(12, 16)
    return runner


def wrappers(runner: DeviceRunner, kind: int = 0) -> tuple[Any, Any]:
    """Of contexts and of generations, of the model's first or second kind of layer."""
    ops = runner.decoder.ops
    assert isinstance(ops, FlashInferOps)
    parts = ops._attention._contexts, ops._attention._generations
    contexts, generations = (list(part.values())[kind] for part in parts)
    return contexts, generations


def mixed() -> PackedInputs:
    return packed((2, Phase.CONTEXT, 0, 9), (1, Phase.GENERATION, 21, 22))


def test_a_runner_plans_once_for_layers_of_a_kind_and_has_the_logits_of_the_reference(
    tmp_path: Path,
) -> None:
    flashinfer, reference = (
        runner_of(tmp_path, "gemma2", attention_backend=backend, cuda_graph_mode=False)
        for backend in ("flashinfer", "torch")
    )
    parts = [part for kind in (0, 1) for part in wrappers(flashinfer, kind)]
    assert [part.window_left for part in parts] == [SLIDING_WINDOW - 1] * 2 + [-1] * 2
    for inputs, planned in (
        (context(0, 1, end=21), [1, 0, 1, 0]),
        (generation(0, at=21), [0, 1, 0, 1]),
        (mixed(), [1, 1, 1, 1]),
    ):
        before = [part.num_plans for part in parts]
        got, want = logits_of(flashinfer, inputs), logits_of(reference, inputs)
        assert np.isfinite(got).all() and np.abs(got - want).max() <= 0.02 * want.std()
        assert np.subtract([part.num_plans for part in parts], before).tolist() == planned


def test_graphs_keep_our_kernels(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    assert runner.captured_sizes == (1, 2)
    runner.forward(context(0))
    seen = [part.num_runs for part in wrappers(runner)]
    assert seen[0] > 0
    assert np.isfinite(logits_of(runner, generation(0))).all()
    assert [part.num_runs for part in wrappers(runner)] == seen


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "mps", "FlashInfer needs a CUDA device"),
        ({"head_dim": 96}, "cuda", "takes heads of 64, 128 and 256, not of 96"),
        ({"dtype": torch.float32}, "cuda", "computes in fp16 and bf16, not in torch.float32"),
    ],
)
def test_what_it_cannot_do_is_said(changes: dict[str, Any], device: str, reason: str) -> None:
    said = unsupported_reason(replace(SHAPE, **changes), torch.device(device))
    assert said is not None and reason in said


@pytest.mark.parametrize(
    ("keys", "reason"),
    [({"dtype": "fp32"}, "computes in fp16 and bf16"), ({}, "flashinfer: an undefined symbol")],
)
def test_forced_where_it_cannot_be_it_is_refused_before_the_weights(
    keys: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *arguments: Any, **options: Any) -> None:
            raise RuntimeError("an undefined symbol\nand more")

    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Broken)
    monkeypatch.setattr("inflight.model.device.load._load_weights", pytest.fail)
    with pytest.raises(ConfigError, match=f"attention_backend: .*{reason}"):
        runner_of(tmp_path, **keys)


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="flashinfer: the package flashinfer is not installed"):
        runner_of(tmp_path)


def test_the_workspace_holds_what_the_planner_may_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "multiprocessors", lambda device: 132)
    wide = AttentionShape(
        num_heads=64, num_kv_heads=4, head_dim=128, tokens_per_block=16, dtype=torch.float16
    )
    # 66 tiles of 128 rows for each of 64 heads, 129 numbers of 4 bytes.
    assert workspace_bytes(wide, CPU) == 66 * 128 * 64 * 129 * 4 + (1 << 20)
    assert workspace_bytes(SHAPE, CPU) == 128 << 20


def test_the_stage_for_a_card_has_a_row_for_each_case_and_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = tuple(flashinfer_cases())[:2]
    assert [row.outcome for row in stage.equality(cases, CPU)] == [Outcome.OK] * 2
    launches = default_launches(64, torch.bfloat16)
    rows = list(stage.speed(SMALL, launches, CPU))
    assert len(rows) == len(SMALL.generations) + len(SMALL.contexts)
    assert all(row.value and "of our kernels' time" in row.note for row in rows)
    monkeypatch.setattr(fake_flashinfer, "BatchPrefillWithPagedKVCacheWrapper", None)
    failed = [*stage.equality(cases, CPU), *stage.speed(SMALL, launches, CPU)]
    assert [row.outcome for row in failed] == [Outcome.FAILED] * 3
