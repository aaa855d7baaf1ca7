"""Recorded calls give what calls from Python give, to the bit, where all of a layer is native."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.api.config import InflightConfig
from inflight.batch import Phase, ScheduledBatch, ScheduledChunk
from inflight.model.fused.assemble import make_decoder
from inflight.model.fused.forward import FusedDecoder
from inflight.model.fused.load import build_fused_runner
from inflight.model.packing import Packer
from inflight.model.runner import PackedInputs
from inflight.native.elementwise import NativeElementwise
from inflight.native.library import Float, Int, Pointer
from inflight.native.recorded_calls import CallRecorder, RecordedCalls
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint
from tests.numeric.native_library import native_library
from tests.numeric.packed_driver import request_of

pytestmark = pytest.mark.numeric

TOKENS_PER_BLOCK = 16
RECORDED = [
    "llama", "qwen2", "qwen3", "granite", "gemma", "gemma2", "olmo2", "phi", "phi3", "starcoder2",
    "gpt_neox", "cohere",
]  # fmt: skip
NOT_RECORDED = ["mixtral", "qwen2_moe"]
"""Experts gather their rows in torch."""


def decoders_of(folder: Path, model_type: str, dtype: str) -> tuple[FusedDecoder, FusedDecoder]:
    """One that records, and one of the same weights that does not."""
    config = InflightConfig(dtype=dtype, max_num_tokens=80)
    recording = build_fused_runner(
        tiny_checkpoint(folder, model_type), config, native_library()
    ).decoder
    plain = make_decoder(
        recording.spec, recording.weights, native_library(), max_num_tokens=80, max_seq_len=128
    )
    for decoder in (recording, plain):
        decoder.ops.attention.allocate(20, TOKENS_PER_BLOCK)
    return recording, plain


def iterations() -> list[PackedInputs]:
    """Contexts in chunks of several sizes; some sizes come again, with other tokens, positions and
    tables. In some iterations every row samples, in others the last of each chunk."""
    draw = np.random.default_rng(3)
    tokens = draw.integers(3, VOCAB_SIZE, size=(3, 100))
    tables = draw.permutation(20)[:18].reshape(3, 6).astype(np.int32)
    packer = Packer(
        max_num_tokens=80,
        max_batch_size=3,
        max_blocks_per_sequence=6,
        tokens_per_block=TOKENS_PER_BLOCK,
    )
    requests = [request_of(i, row) for i, row in enumerate(tokens)]

    def pack(*parts: tuple[int, int, int]) -> PackedInputs:
        chunks = tuple(
            ScheduledChunk(requests[number], Phase.CONTEXT, start, end - start, True)
            for number, start, end in parts
        )
        inputs = packer.pack(ScheduledBatch(0, context=chunks), lambda number: tables[number])
        kept = {
            name: array.copy()
            for name in ("token_ids", "position_ids", "slot_mapping", "cu_seqlens_q",
                         "context_lens", "block_tables", "logits_indices")
            if (array := getattr(inputs, name)) is not None
        }  # fmt: skip
        return replace(inputs, **kept)

    return [
        pack((0, 0, 70)),
        pack((1, 0, 5)),
        pack((1, 5, 6), (2, 0, 4)),
        pack((0, 70, 71)),
        pack((1, 6, 7)),
        pack((0, 71, 72), (1, 7, 8), (2, 4, 7)),
        pack((0, 72, 73), (1, 8, 9), (2, 7, 8)),
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("model_type", [*RECORDED, *NOT_RECORDED])
def test_logits_are_the_same(model_type: str, dtype: str, tmp_path: Path) -> None:
    recording, plain = decoders_of(tmp_path, model_type, dtype)
    every_row_samples = [len(i.logits_indices) == len(i.token_ids) for i in iterations()]
    assert {True, False} == set(every_row_samples)
    for inputs in iterations():
        assert torch.equal(recording.forward(inputs), plain.forward(inputs))
    assert recording.is_recorded == (model_type in RECORDED) and not plain.is_recorded


def test_positions_that_the_rope_tables_lack_are_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, _ = decoders_of(tmp_path, "llama", "fp32")
    inputs = iterations()[1]
    recording.forward(inputs)
    assert recording.is_recorded
    made: list[int] = []
    monkeypatch.setattr(
        RecordedCalls, "make", lambda calls, num_rows, num_calls=None: made.append(num_rows)
    )
    with pytest.raises(AssertionError):
        recording.forward(replace(inputs, context_lens=inputs.context_lens + 10_000))
    assert not made


def test_a_recorder_computes_nothing_and_refuses_what_cannot_be_made_again() -> None:
    recorder = CallRecorder(num_rows=2)
    x, weight, out = torch.randn(2, 64), torch.rand(64), torch.zeros(2, 64)
    NativeElementwise(recorder).rms_norm(x, weight, 1e-5, out)
    assert not out.any() and len(recorder.calls) == 1
    expected = torch.empty(2, 64)
    NativeElementwise(native_library()).rms_norm(x, weight, 1e-5, expected)
    calls = RecordedCalls(native_library(), recorder)
    calls.make(1)
    assert torch.equal(out[0], expected[0]) and not out[1].any(), "of the first row"
    calls.make(2)
    assert torch.equal(out, expected)
    embed = recorder.function("inflight_embed", Pointer, Int, Float, result=Int)
    with pytest.raises(AssertionError, match="inflight_embed cannot be recorded"):
        embed(0, 1, 1.0)
