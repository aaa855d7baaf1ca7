"""Microseconds a layer of the native attention: python tests/benchmarks/native_attention_speed.py

Heads of SmolLM2-135M (9 query heads, 3 KV heads of 64), bf16. Every call attends another layer, so
K and V come from memory and not from the cores' own caches. Each figure is the best call. GB/s
counts K and V as read once; GFLOP/s the products with keys that are seen. ``Zen 4`` is what the
best kernel of an earlier study took on two cores of another machine, for orientation.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from inflight.model.runner import PackedInputs
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.library import Isa, NativeLibrary, load_native

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
KV_BYTES = 1 << 28
MAX_LAYERS = 48

CASES: dict[str, tuple[list[tuple[int, int]], str]] = {
    "B1 ctx128": ([(1, 128)], "6"),
    "B8 ctx128": ([(1, 128)] * 8, "36-40"),
    "B32 ctx128": ([(1, 128)] * 32, "235"),
    "B64 ctx128": ([(1, 128)] * 64, "430-470"),
    "B1 ctx512": ([(1, 512)], "11-14"),
    "B8 ctx512": ([(1, 512)] * 8, "133-220"),
    "B32 ctx512": ([(1, 512)] * 32, "813-890"),
    "B64 ctx512": ([(1, 512)] * 64, "1034-1680"),
    "B1 ctx2048": ([(1, 2048)], "125"),
    "B8 ctx2048": ([(1, 2048)] * 8, "834-1164"),
    "B32 ctx2048": ([(1, 2048)] * 32, "2800-3500"),
    "context 512": ([(512, 512)], "1080-1140"),
    "context 2048": ([(2048, 2048)], "16700"),
    "chunk 512 at 1536": ([(512, 2048)], "7080"),
    "chunk 256 + 31 at 512": ([(256, 512)] + [(1, 512)] * 31, "1170"),
}
"""(rows, context length) of each sequence, and the figure of the study."""


def make_rows(sequences: list[tuple[int, int]], tokens_per_block: int) -> PackedInputs:
    """The sequences' last rows, with blocks that lie anywhere."""
    rows, lengths = (np.array(column) for column in zip(*sequences, strict=True))
    counts = -(-lengths // tokens_per_block)
    ids = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    tables = np.zeros((len(rows), counts.max()), dtype=np.int32)
    for table, own in zip(tables, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        table[: len(own)] = own
    positions = np.concatenate([np.arange(n - r, n) for r, n in sequences])
    of_row = np.repeat(np.arange(len(rows)), rows)
    blocks = tables[of_row, positions // tokens_per_block].astype(np.int64)
    num_contexts = int((rows > 1).sum())
    return PackedInputs(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        position_ids=positions,
        slot_mapping=blocks * tokens_per_block + positions % tokens_per_block,
        cu_seqlens_q=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
        context_lens=lengths.astype(np.int32),
        block_tables=tables,
        logits_indices=np.cumsum(rows) - 1,
        num_context_sequences=num_contexts,
        num_context_tokens=int(rows[:num_contexts].sum()),
    )


def best_microseconds(
    library: NativeLibrary, inputs: PackedInputs, tokens_per_block: int, seconds: float
) -> float:
    num_blocks = int((-(-inputs.context_lens // tokens_per_block)).sum())
    layer_bytes = num_blocks * tokens_per_block * NUM_KV_HEADS * 2 * HEAD_DIM * 2
    num_layers = max(2, min(MAX_LAYERS, KV_BYTES // layer_bytes))
    attention = NativeAttention(
        library,
        num_layers=num_layers,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
    )
    attention.allocate(num_blocks, tokens_per_block)
    attention.storage.normal_()
    rules = LayerRules(
        num_heads=NUM_HEADS, head_dim=HEAD_DIM, scale=0.125, cos_sin=torch.rand(4096, HEAD_DIM)
    )
    num_tokens = len(inputs.position_ids)
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    out = torch.empty(num_tokens, NUM_HEADS * HEAD_DIM, dtype=torch.bfloat16)
    attention.plan(inputs)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for layer in range(num_layers):
            start = time.perf_counter()
            attention.attend(layer, rules, qkv, out)
            best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the native attention.")
    parser.add_argument("--cache-dir", default="", help="where the compiled library is kept")
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--isa", nargs="*", default=[], help="avx2, avx512, amx, portable")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    library = load_native(arguments.cache_dir)
    if library is None:
        raise SystemExit("there is no native library to time")
    library.set_num_threads(arguments.threads)
    isas = [Isa[name.upper()] for name in arguments.isa] or [library.best_isa]
    columns = "".join(f"{isa.name.lower():>10}{'GB/s':>7}{'GFLOP/s':>9}" for isa in isas)
    print(f"{'us per layer':24}{columns}   Zen 4")
    for name, (sequences, study) in CASES.items():
        if arguments.only not in name:
            continue
        inputs = make_rows(sequences, arguments.tokens_per_block)
        read = sum(length for _, length in sequences) * NUM_KV_HEADS * 2 * HEAD_DIM * 2
        seen = sum(rows * length - rows * (rows - 1) // 2 for rows, length in sequences)
        line = f"{name:24}"
        for isa in isas:
            with library.limited_to(isa):
                us = best_microseconds(
                    library, inputs, arguments.tokens_per_block, arguments.seconds
                )
            flops = seen * NUM_HEADS * HEAD_DIM * 4
            line += f"{us:10.1f}{read / us / 1e3:7.1f}{flops / us / 1e3:9.0f}"
        print(f"{line}   {study}")


if __name__ == "__main__":
    main()
