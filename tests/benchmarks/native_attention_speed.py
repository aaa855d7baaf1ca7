"""Microseconds a layer of the native attention: python -m tests.benchmarks.native_attention_speed

Heads of SmolLM2-135M (9 query heads, 3 KV heads of 64). One row a case: the KV dtypes side by side,
called in turn; each figure is the best call. Every call attends another layer, so K and V come from
memory and not from the cores' own caches. GB/s counts the stored K and V as read once, beside what
the same threads reach by only reading; GFLOP/s the products with keys that are seen.

``--other FILE`` takes turns with a library that was built from other sources, as of an earlier
commit: its own best call, and in how many times the time of the call before it a call of it ends
(the median, which a machine whose speed changes spoils less than the best).
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from inflight.model.runner import PackedInputs
from inflight.native.attention import LayerRules, NativeAttention
from inflight.native.library import Isa, NativeLibrary, load_native

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
KV_BYTES = 1 << 28
MAX_LAYERS = 48
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}

CASES: dict[str, list[tuple[int, int]]] = {
    **{f"B{b} ctx{n}": [(1, n)] * b for n in (256, 2048) for b in (1, 8, 32, 64)},
    "B1 ctx8192": [(1, 8192)],
    "context 512": [(512, 512)],
    "context 2048": [(2048, 2048)],
    "chunk 512 at 1536": [(512, 2048)],
    "chunk 256 + 31 at 512": [(256, 512)] + [(1, 512)] * 31,
}
"""(rows, context length) of each sequence."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Filled storage of one dtype."""

    attention: NativeAttention
    num_layers: int
    kv_bytes: int
    """Of one layer."""


def make_subject(
    library: NativeLibrary, inputs: PackedInputs, tokens_per_block: int, dtype: torch.dtype
) -> Subject:
    num_blocks = int((-(-inputs.context_lens // tokens_per_block)).sum())
    of_one = NativeAttention(
        library, num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    layer_bytes = num_blocks * tokens_per_block * of_one.kv_bytes_per_token
    num_layers = max(2, min(MAX_LAYERS, KV_BYTES // layer_bytes))
    attention = NativeAttention(
        library, num_layers=num_layers, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    attention.allocate(num_blocks, tokens_per_block)
    if dtype is torch.int8:
        attention.storage.fill_(0x3C)  # four such bytes, where scales lie, are 0.0115
    else:
        attention.storage.normal_()
    kv_bytes = int(inputs.context_lens.sum()) * of_one.kv_bytes_per_token
    return Subject(attention=attention, num_layers=num_layers, kv_bytes=kv_bytes)


def seconds_of_calls(
    subjects: list[Subject], inputs: PackedInputs, seconds: float
) -> list[list[float]]:
    """Of each subject, called in turn for ``seconds`` each."""
    rules = LayerRules(
        num_heads=NUM_HEADS, head_dim=HEAD_DIM, scale=0.125, cos_sin=torch.rand(8192, HEAD_DIM)
    )
    num_tokens = len(inputs.position_ids)
    qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    out = torch.empty(num_tokens, NUM_HEADS * HEAD_DIM, dtype=torch.bfloat16)
    for subject in subjects:
        subject.attention.plan(inputs)
    taken: list[list[float]] = [[] for _ in subjects]
    end = time.perf_counter() + seconds * len(subjects)
    layer = 0
    while time.perf_counter() < end:
        for calls, subject in zip(taken, subjects, strict=True):
            start = time.perf_counter()
            subject.attention.attend(layer % subject.num_layers, rules, qkv, out)
            calls.append(time.perf_counter() - start)
        layer += 1
    return taken


def read_gigabytes_per_second(seconds: float) -> float:
    """Of reading 256 MiB with torch's threads."""
    numbers = torch.ones(KV_BYTES // 4)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - start)
    return numbers.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the native attention.")
    parser.add_argument("--cache-dir", default="", help="where the compiled library is kept")
    parser.add_argument("--tokens-per-block", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--isa", default="", help="portable, avx2, avx512, amx; the best if empty")
    parser.add_argument("--kv", nargs="*", default=["bf16", "int8"], help="bf16, fp32, int8")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--other", type=Path, help="a library to take turns with")
    options = parser.parse_args()
    library = load_native(options.cache_dir, every_isa=True)
    if library is None:
        raise SystemExit("there is no native library to time")
    libraries = [library] + ([NativeLibrary(options.other)] if options.other else [])
    torch.set_num_threads(options.threads)
    isa = Isa[options.isa.upper()] if options.isa else library.best_isa
    print(f"{isa.name.lower()}, {options.threads} threads", end="; ")
    print(f"they read {read_gigabytes_per_second(options.seconds):.1f} GB/s")
    of_other = "     other  times" if options.other else ""
    columns = "".join(f"{kv:>10}   GB/s  GFLOP/s{of_other}" for kv in options.kv)
    print(f"{'us per layer':24}{columns}")
    with ExitStack() as limited:
        for one in libraries:
            one.set_num_threads(options.threads)
            limited.enter_context(one.limited_to(isa))
        for name, sequences in CASES.items():
            if options.only in name:
                report(name, sequences, libraries, options)


def report(
    name: str,
    sequences: list[tuple[int, int]],
    libraries: list[NativeLibrary],
    options: argparse.Namespace,
) -> None:
    inputs = make_rows(sequences, options.tokens_per_block)
    subjects = [
        make_subject(library, inputs, options.tokens_per_block, DTYPES[kv])
        for kv in options.kv
        for library in libraries
    ]
    taken = seconds_of_calls(subjects, inputs, options.seconds)
    seen = sum(rows * length - rows * (rows - 1) // 2 for rows, length in sequences)
    flops = seen * NUM_HEADS * HEAD_DIM * 4
    line = f"{name:24}"
    for first in range(0, len(subjects), len(libraries)):
        best = min(taken[first])
        rate, speed = subjects[first].kv_bytes / best / 1e9, flops / best / 1e9
        line += f"{best * 1e6:10.1f}{rate:7.1f}{speed:9.0f}"
        for others in taken[first + 1 : first + len(libraries)]:
            times = np.median(np.divide(others, taken[first]))
            line += f"{min(others) * 1e6:10.1f}{times:6.2f}x"
    print(line, flush=True)


if __name__ == "__main__":
    main()
