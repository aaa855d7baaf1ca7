"""The native attention against the textbook in float64, on every instruction set of the machine.

All storage is poisoned before the sequences write theirs, so whatever is read that nobody wrote
shows, and blocks that a window has passed are poisoned again. What is particular to int8 storage is
in test_native_attention_int8.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.model.attention import AttentionRules, KvLayer
from inflight.model.native_attention import NativeAttentionBackend, unsupported_layers
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.block_sizes import SUPPORTED_TOKENS_PER_BLOCK
from inflight.native.library import NativeLibrary
from tests.numeric.attention_cases import (
    INT8_TOLERANCE,
    LARGE,
    LAYER,
    TOLERANCE,
    WIDE_WINDOW,
    computed_output,
    dequantized_case,
    library,
    split_at_iteration,
    textbook,
)
from tests.numeric.native_library import native_library
from tests.numeric.test_torch_attention import MIXED, PLAIN, RULES, expected_output, make_case

pytestmark = pytest.mark.numeric

__all__ = ["library"]  # the fixture


@pytest.fixture(params=["wide", "int8"])
def kv(request: pytest.FixtureRequest) -> str:
    """K and V are kept in the type that they are computed in, or as int8."""
    return str(request.param)


def check(
    library: NativeLibrary,
    kv: str,
    sequences: list[tuple[int, int]],
    *,
    layer: KvLayer = LAYER,
    rules: AttentionRules = PLAIN,
    num_heads: int = 4,
    tokens_per_block: int = 32,
) -> None:
    shape = (tuple(sequences), layer, rules, num_heads, tokens_per_block)
    if kv == "int8":
        case, expected = dequantized_case(*shape)
        kinds = [(torch.float32, torch.int8, INT8_TOLERANCE[library.isa])]
    else:
        case, expected = textbook(*shape)
        kinds = [(dtype, dtype, tolerance) for dtype, tolerance in TOLERANCE.items()]
    for dtype, kv_dtype, tolerance in kinds:
        got = computed_output(library, case, layer, rules, tokens_per_block, dtype, kv_dtype)
        np.testing.assert_allclose(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("tokens_per_block", SUPPORTED_TOKENS_PER_BLOCK)
def test_every_block_size(library: NativeLibrary, kv: str, tokens_per_block: int) -> None:
    check(library, kv, LARGE, tokens_per_block=tokens_per_block)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("sequences", [MIXED, LARGE], ids=["small", "large"])
def test_every_rule(
    library: NativeLibrary, kv: str, name: str, sequences: list[tuple[int, int]]
) -> None:
    check(library, kv, sequences, rules=RULES[name])


def test_a_window_of_several_tiles(library: NativeLibrary, kv: str) -> None:
    check(library, kv, LARGE, rules=WIDE_WINDOW)


@pytest.mark.parametrize("tokens_per_block", SUPPORTED_TOKENS_PER_BLOCK)
@pytest.mark.parametrize("window", [1, 17, 40, 100])
def test_a_window_that_begins_anywhere_in_a_tile(
    library: NativeLibrary, kv: str, window: int, tokens_per_block: int
) -> None:
    sequences = [(33, 200), (2, 131), *((1, 300 + 7 * i) for i in range(10))]
    rules = AttentionRules(scale=0.3, sliding_window=window)
    check(library, kv, sequences, rules=rules, tokens_per_block=tokens_per_block)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_every_head_size(library: NativeLibrary, kv: str, head_dim: int) -> None:
    layer = KvLayer(num_kv_heads=2, key_dim=head_dim, value_dim=head_dim)
    check(library, kv, [(19, 19), (9, 70), (1, 33), (1, 130)], layer=layer)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(1, 1), (3, 3), (9, 3), (40, 1), *((rows, 1) for rows in (2, 4, 5, 6, 7, 14))],
)
def test_every_kind_of_group(
    library: NativeLibrary, kv: str, num_heads: int, num_kv_heads: int
) -> None:
    layer = KvLayer(num_kv_heads=num_kv_heads, key_dim=32, value_dim=32)
    check(library, kv, MIXED, layer=layer, num_heads=num_heads)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_the_split_over_threads_changes_nothing(kv: str, num_threads: int) -> None:
    """One generation alone is cut along its keys; merged, with the sink counted once."""
    library = native_library()
    library.set_num_threads(num_threads)
    try:
        for rules in (PLAIN, RULES["sinks"], RULES["all"]):
            check(library, kv, [(1, 1500)], rules=rules)
            check(library, kv, [(40, 700), (1, 900)], rules=rules)
    finally:
        library.set_num_threads(torch.get_num_threads())


def test_a_context_in_chunks_gives_what_it_gives_at_once(library: NativeLibrary) -> None:
    case = make_case([(150, 150)], LAYER, num_heads=4, tokens_per_block=16)
    inputs, expected = case.inputs, expected_output(case, PLAIN)
    query, key, value = (
        torch.from_numpy(rows).float() for rows in (case.query, case.keys[0], case.values[0])
    )
    backend = NativeAttentionBackend(library, torch.float32)
    backend.allocate([LAYER], num_blocks=case.num_blocks, tokens_per_block=16)
    backend.storage.fill_(torch.nan)
    for rows in (slice(0, 48), slice(48, 49), slice(49, 150)):
        part = replace(
            inputs,
            position_ids=inputs.position_ids[rows],
            slot_mapping=inputs.slot_mapping[rows],
            cu_seqlens_q=np.array([0, rows.stop - rows.start], dtype=np.int32),
            context_lens=np.array([rows.stop], dtype=np.int32),
        )
        backend.begin_iteration(part)
        got = backend.attend(0, query[rows], key[rows], value[rows], PLAIN)
        np.testing.assert_allclose(got.double().numpy(), expected[rows], atol=1e-5, rtol=0)


NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64


def normed(
    heads: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float
) -> torch.Tensor:
    """heads [T, n, D] in float64; the weights say over what the mean goes."""
    rows = heads if weight.numel() == heads.shape[-1] else heads.flatten(1)
    factor = torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return (rows * factor * (weight.double() + offset)).view_as(heads)


def turned(heads: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    rotary_dim = cos_sin.shape[1]
    cosine, sine = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    low, high = heads[..., :rotary_dim].chunk(2, dim=-1)
    rest = heads[..., rotary_dim:]
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), dim=-1)


@pytest.mark.parametrize("rotary_dim", [0, 20, 64])
@pytest.mark.parametrize("norm", ["none", "head", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norm_and_rope_of_the_fused_projection(
    library: NativeLibrary, rotary_dim: int, norm: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = KvLayer(num_kv_heads=NUM_KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM)
    case = make_case([(40, 40), (3, 3), (1, 1)], layer, num_heads=NUM_HEADS, tokens_per_block=32)
    positions = torch.from_numpy(case.inputs.position_ids)
    num_tokens, width = len(positions), (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = torch.randn((num_tokens, width), generator=generator).to(dtype)
    cos_sin = torch.randn((64, rotary_dim), generator=generator) if rotary_dim else None
    sizes = {"head": (1, 1), "row": (NUM_HEADS, NUM_KV_HEADS)}
    q_norm, k_norm = (
        (torch.rand(n * HEAD_DIM, generator=generator) for n in sizes[norm])
        if norm in sizes
        else (None, None)
    )
    rules = LayerRules(
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        scale=0.1,
        cos_sin=cos_sin,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_epsilon=1e-3,
        norm_offset=0.5,
    )
    attention = NativeAttention(
        library, num_layers=2, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    attention.allocate(case.num_blocks, 32)
    attention.storage.fill_(torch.nan)
    attention.plan(case.inputs)
    out = torch.empty(num_tokens, NUM_HEADS * HEAD_DIM)
    attention.attend(1, rules, qkv, out)
    assert torch.isnan(attention.storage[0]).all()

    heads = qkv.double().view(num_tokens, -1, HEAD_DIM)
    query, key, value = heads.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = normed(query, q_norm, 1e-3, 0.5), normed(key, k_norm, 1e-3, 0.5)
    if cos_sin is not None:
        query, key = turned(query, cos_sin, positions), turned(key, cos_sin, positions)
    starts = case.inputs.cu_seqlens_q
    spans = [slice(int(a), int(b)) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    case.query = query.numpy()
    case.keys = [key[span].numpy() for span in spans]
    case.values = [value[span].numpy() for span in spans]
    expected = expected_output(case, AttentionRules(scale=0.1)).reshape(num_tokens, -1)
    np.testing.assert_allclose(out.numpy(), expected, atol=TOLERANCE[dtype], rtol=0)


def test_results_can_be_of_another_type_than_the_inputs() -> None:
    case = make_case(MIXED, LAYER, num_heads=4, tokens_per_block=32)
    attention = NativeAttention(
        native_library(), num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.float32
    )
    attention.allocate(case.num_blocks, 32)
    attention.plan(case.inputs)
    qkv = torch.randn(len(case.query), 8 * 64)
    rules = LayerRules(num_heads=4, head_dim=64, scale=0.1)
    wide, narrow = torch.empty(len(qkv), 256), torch.empty(len(qkv), 256, dtype=torch.bfloat16)
    attention.attend(0, rules, qkv, wide)
    attention.attend(0, rules, qkv, narrow)
    assert torch.equal(wide.bfloat16(), narrow)


def test_heads_are_read_wherever_they_lie() -> None:
    case = make_case(MIXED, LAYER, num_heads=4, tokens_per_block=32)
    own = [split_at_iteration(case, whole)[1] for whole in (case.keys, case.values)]
    tensors = [torch.from_numpy(rows).float() for rows in (case.query, *own)]
    apart = [heads.transpose(0, 1).contiguous().transpose(0, 1) for heads in tensors]
    backwards = [heads.permute(2, 1, 0).contiguous().permute(2, 1, 0) for heads in tensors]
    outputs = []
    for query, key, value in (tensors, apart, backwards):
        backend = NativeAttentionBackend(native_library(), torch.float32)
        backend.allocate([LAYER], num_blocks=case.num_blocks, tokens_per_block=32)
        backend.begin_iteration(case.inputs)
        outputs.append(backend.attend(0, query, key, value, PLAIN))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_layer_that_changes_its_rules_gets_what_it_asks_for() -> None:
    case = make_case(MIXED, LAYER, num_heads=4, tokens_per_block=32)
    key, value = (
        torch.from_numpy(split_at_iteration(case, whole)[1]).float()
        for whole in (case.keys, case.values)
    )
    backend = NativeAttentionBackend(native_library(), torch.float32)
    backend.allocate([LAYER], num_blocks=case.num_blocks, tokens_per_block=32)
    backend.begin_iteration(case.inputs)
    query = torch.from_numpy(case.query).float()
    once = [backend.attend(0, query, key, value, rules) for rules in RULES.values()]
    again = [backend.attend(0, query, key, value, rules) for rules in RULES.values()]
    for first, second in zip(once, again, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(once[0], once[1])


def test_copied_blocks_hold_the_same_in_every_layer() -> None:
    attention = NativeAttention(
        native_library(), num_layers=3, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16
    )
    attention.allocate(6, 16)
    attention.storage.normal_()
    before = attention.storage.clone()
    # 1 -> 4 and 4 -> 2 at once: block 2 gets what 4 held before.
    attention.copy_blocks(np.array([1, 4], dtype=np.int32), np.array([4, 2], dtype=np.int32))
    assert torch.equal(attention.storage, before[:, [0, 1, 4, 3, 1, 5]])


def test_bytes_per_token_are_those_of_the_storage() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        backend = NativeAttentionBackend(native_library(), dtype)
        backend.allocate([LAYER] * 3, num_blocks=6, tokens_per_block=16)
        assert backend.kv_bytes_per_token([LAYER] * 3) * 6 * 16 == backend.storage.nbytes


def test_a_pool_that_does_not_fit_is_a_configuration_error() -> None:
    backend = NativeAttentionBackend(native_library(), torch.float32)
    with pytest.raises(ConfigError, match="no memory for 1099511627776 KV blocks"):
        backend.allocate([LAYER], num_blocks=1 << 40, tokens_per_block=32)


@pytest.mark.parametrize(
    ("layers", "dtype", "device", "reason"),
    [
        ([LAYER, LAYER], torch.float32, "cuda", "runs on the CPU, not on cuda"),
        ([LAYER], torch.float16, "cpu", "fp32 and bf16, not in torch.float16"),
        ([LAYER, replace(LAYER, num_kv_heads=1)], torch.float32, "cpu", "same KV heads"),
        ([replace(LAYER, value_dim=48)], torch.float32, "cpu", "one size, not 64 and 48"),
        ([replace(LAYER, key_dim=40, value_dim=40)], torch.float32, "cpu", "not 40"),
        ([replace(LAYER, key_dim=528, value_dim=528)], torch.float32, "cpu", "not 528"),
    ],
)
def test_what_is_not_supported_is_said(
    layers: list[KvLayer], dtype: torch.dtype, device: str, reason: str
) -> None:
    said = unsupported_layers(layers, dtype, torch.device(device))
    assert said is not None and reason in said
    assert unsupported_layers([LAYER] * 2, torch.bfloat16, torch.device("cpu")) is None
