"""An engine's proof reaches what a service runs: what is wrong in one of its ways is refused."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.api.config import InflightConfig
from inflight.errors import CheckpointError
from inflight.model.fused import build, built
from inflight.model.fused.built import course_logits, prove, torch_logits
from inflight.model.fused.forward import FusedDecoder
from inflight.model.loading import load_model
from inflight.model.probe import TOLERANCE, check_rows, check_typical
from inflight.model.probe_course import SHORT, THOROUGH, Course
from inflight.model.runner import PackedInputs
from inflight.native import linear
from inflight.native.packed import PackedLinear, WeightKind
from inflight.native.quantize import quantize
from tests.fakes.tiny_models import save_tiny_checkpoint, tiny_config
from tests.numeric.native_library import native_library

pytestmark = pytest.mark.numeric

DTYPES = ("fp32", "bf16", "int8", "int4")
SIZES = (16, 32, 64, 128)


class Wrapped:
    """Operations of which a test changes one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WrongGeneration(Wrapped):
    """Attention that goes wrong in the last generation of an iteration, beside contexts or not."""

    def plan(self, rows: PackedInputs) -> None:
        num_generations = len(rows.context_lens) - rows.num_context_sequences
        self.is_wrong = num_generations > 1
        self._inner.plan(rows)

    def attend(self, layer: int, rules: Any, qkv: Tensor, out: Tensor) -> None:
        self._inner.attend(layer, rules, qkv, out)
        if self.is_wrong:
            out[-1] = out[-1].roll(1)


class WrongBlock(Wrapped):
    """Attention that reads a sequence's last block in place of the one before it."""

    def plan(self, rows: PackedInputs) -> None:
        tables = rows.block_tables.copy()
        for table, length in zip(tables, rows.context_lens, strict=True):
            last = (length - 1) // self._tokens_per_block
            if last:
                table[last - 1] = table[last]
        self._inner.plan(replace(rows, block_tables=tables))

    def allocate(self, num_blocks: int, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._inner.allocate(num_blocks, tokens_per_block)


class WrongManyRows(Wrapped):
    """Linears that leave the row behind the 32nd as it was, as a tile too short would."""

    def __call__(
        self, x: Tensor, packed: PackedLinear, out: Tensor, *, accumulate: bool = False
    ) -> None:
        before = out[32:33].clone()
        self._inner(x, packed, out, accumulate=accumulate)
        out[32:33] = before


def spoil(monkeypatch: pytest.MonkeyPatch, part: str, wrong: type[Wrapped]) -> None:
    really_make = built.make_decoder

    def make(*arguments: Any, **options: Any) -> FusedDecoder:
        decoder = really_make(*arguments, **options).unrecorded()
        inner = getattr(decoder.ops, part)
        decoder.ops = replace(decoder.ops, **{part: wrong(inner)})
        return decoder

    monkeypatch.setattr(built, "make_decoder", make)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("part", "wrong"),
    [("attention", WrongGeneration), ("attention", WrongBlock), ("linear", WrongManyRows)],
)
def test_what_goes_wrong_in_one_way_of_computing_is_refused(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, part: str, wrong: type[Wrapped]
) -> None:
    engine = engine_of(dtype)
    for tokens_per_block in SIZES:
        assert prove(engine, dtype, native_library(), tokens_per_block) <= TOLERANCE[dtype]
    spoil(monkeypatch, part, wrong)
    for tokens_per_block in SIZES:
        with pytest.raises(CheckpointError, match="logits .* differ by"):
            prove(engine, dtype, native_library(), tokens_per_block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_do_not_hide_it(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A quarter of the generations may be off, as near-ties make them; not all of them."""

    class WrongGenerations(WrongGeneration):
        def plan(self, rows: PackedInputs) -> None:
            self._count = len(rows.context_lens) - rows.num_context_sequences
            self._inner.plan(rows)

        def attend(self, layer: int, rules: Any, qkv: Tensor, out: Tensor) -> None:
            self._inner.attend(layer, rules, qkv, out)
            if self._count:
                out[-self._count :] = out[-self._count :].roll(1, dims=1)

    engine = engine_of(dtype, "qwen3_moe")
    assert prove(engine, dtype, native_library(), 32) <= TOLERANCE[dtype]
    spoil(monkeypatch, "attention", WrongGenerations)
    with pytest.raises(CheckpointError, match="qwen3_moe is not served: .*logits"):
        prove(engine, dtype, native_library(), 32)


def test_what_int4_makes_of_a_model_is_refused_where_rounding_alone_destroys_it(
    tmp_path: Path,
) -> None:
    """Scores of random weights that nothing divides, as transformers' default for Granite has it:
    transformers' own fp32 forward is as far off once its weights are rounded."""
    by_multiplier = {1.0: True, 1 / 16: False}
    for multiplier, is_destroyed in by_multiplier.items():
        folder = tmp_path / f"{multiplier}"
        model = tiny_config("granite", attention_multiplier=multiplier, embedding_multiplier=1.0)
        model.residual_multiplier = 1.0
        directory = save_tiny_checkpoint(folder, model)
        exact, rounded = (plain_logits_of(directory, kind) for kind in (None, "q4_1"))
        config = InflightConfig(dtype="int4", cache_dir=str(tmp_path / "cache"), max_seq_len=64)
        if is_destroyed:
            with pytest.raises(CheckpointError, match="packed and plain logits differ by"):
                check_typical(rounded, exact, "granite", "int4")
            with pytest.raises(CheckpointError, match="packed and plain logits differ by"):
                build.build_engine(directory, config, native_library(), lambda *_: None)
        else:
            check_typical(rounded, exact, "granite", "int4")
            build.build_engine(directory, config, native_library(), lambda *_: None)


def plain_logits_of(directory: Path, kind: WeightKind | None) -> Tensor:
    """Of the course by transformers in fp32, with linears that were rounded to ``kind``."""
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    model.set_attn_implementation("eager")
    for module in model.modules():
        if kind is not None and isinstance(module, torch.nn.Linear):
            rounded = quantize(module.weight, kind).dequantize()
            module.weight.data = rounded[:, : module.in_features].contiguous()
    token_ids = THOROUGH.token_ids(model.config.vocab_size)
    with torch.inference_mode():
        return THOROUGH.plain_logits(lambda ids: model(input_ids=ids).logits, token_ids)


def test_the_proof_is_the_same_every_time(engine_of: Any) -> None:
    found = {prove(engine_of("int4"), "int4", native_library(), 32) for _ in range(3)}
    assert len(found) == 1


def test_torch_passes_the_same_proof(engine_of: Any) -> None:
    for dtype in DTYPES:
        assert prove(engine_of(dtype), dtype, None, 24) <= TOLERANCE[dtype]


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe"])
def test_the_reference_unpacks_a_part_of_one_linear_at_a_time(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    engine = engine_of("fp32", model_type)
    unpacked: list[weakref.ref[Tensor]] = []
    places: list[int] = []
    really_unpack = PackedLinear.unpack

    def unpack(packed: PackedLinear) -> Tensor:
        assert not any(made() is not None for made in unpacked), "another one is still there"
        rows = really_unpack(packed)
        assert packed.n <= 64
        unpacked.append(weakref.ref(rows))
        places.append(packed.data.data_ptr())
        return rows

    monkeypatch.setattr(PackedLinear, "unpack", unpack)
    monkeypatch.setattr(linear, "PIECE_COLUMNS", 64)
    logits = torch_logits(engine, 16)
    monkeypatch.undo()
    assert len(set(places)) == len(places) > 9, "each of them once"
    torch.testing.assert_close(logits, course_logits(engine, None, 16), rtol=0, atol=1e-4)
    torch.testing.assert_close(logits, engine.proof.packed, rtol=0, atol=1e-4)


def rows_of(deviations: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Packed and plain logits whose rows are off by so much of their spread."""
    plain = torch.randn(len(deviations), 1000, generator=torch.Generator().manual_seed(1))
    spread = plain.std(-1, keepdim=True)
    return plain + torch.tensor(deviations)[:, None] * spread, plain


@pytest.mark.parametrize("wrong", [2.0, float("nan"), float("inf")])
def test_every_row_counts(wrong: float) -> None:
    packed, plain = rows_of([0.1] * 7 + [wrong])
    for dtype in DTYPES:
        with pytest.raises(CheckpointError, match="logits of a row and torch's differ by"):
            check_rows(packed, plain, "llama", dtype)
    check_rows(*rows_of([0.1, 0.2]), "llama", "bf16")
    assert check_typical(packed, plain, "llama", "bf16") == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("wrong", [2.0, float("nan"), float("inf")])
def test_of_experts_a_quarter_of_each_group_may_be_off(wrong: float) -> None:
    groups = (range(8), range(8, 12))
    packed, plain = rows_of([wrong, *[0.1] * 8, 0.2, 0.1, 0.1])
    check_rows(packed, plain, "mixtral", "bf16", flipping=groups)
    with pytest.raises(CheckpointError):
        check_rows(packed, plain, "mixtral", "fp32", flipping=groups)
    packed, plain = rows_of([*[0.1] * 8, wrong, wrong, 0.1, 0.1])
    with pytest.raises(CheckpointError):
        check_rows(packed, plain, "mixtral", "bf16", flipping=groups)


@pytest.mark.parametrize("course", [SHORT, THOROUGH])
def test_a_course_computes_every_token_once(course: Course) -> None:
    token_ids = course.token_ids(1000)
    computed: list[int] = []
    sizes: list[tuple[int, int]] = []
    spared: list[int] = []

    def forward(inputs: PackedInputs) -> Tensor:
        num_generations = len(inputs.token_ids) - inputs.num_context_tokens
        sizes.append((inputs.num_context_tokens, num_generations))
        computed.extend(inputs.token_ids.tolist())
        spared.append(len(inputs.token_ids) - len(inputs.logits_indices))
        return torch.from_numpy(inputs.token_ids[inputs.logits_indices])[:, None]

    logits = course.packed_logits(forward, 16, token_ids)
    packed_computed, packed_sizes = computed[:], sizes[:]
    for num_spared, (num_context_tokens, _) in zip(spared, sizes, strict=True):
        assert num_spared == (course is THOROUGH and num_context_tokens > 0)
    whole = course.whole_logits(forward, 16, token_ids)
    assert torch.equal(whole, logits) and sizes[len(packed_sizes) :] == [(course.num_tokens, 0)]
    computed, sizes = packed_computed, packed_sizes
    assert sorted(computed) == sorted(token_ids.tolist())
    assert course.max_num_tokens == max(map(sum, sizes))
    plain = course.plain_logits(lambda ids: ids[..., None].float(), token_ids)
    assert torch.equal(logits.float(), plain), "the rows are those of the same tokens"
    context, generation = course.rows_by_phase
    assert sorted([*context, *generation]) == list(range(len(course.compared)))
    assert len(generation) == sum(count for _, count in sizes)
    if course is THOROUGH:
        assert sum(rows >= 32 for rows, _ in sizes) >= 3 and max(n for _, n in sizes) >= 4
        assert any(rows and count > 1 for rows, count in sizes), "a mixed iteration"
        assert course.max_seq_len > max(SIZES)
