"""What kv_cache_dtype costs: python -m tests.benchmarks.kv_cache_dtype_accuracy

::

    python -m tests.benchmarks.kv_cache_dtype_accuracy [--model-dir DIR] [--dtype bf16]

Every position of windows of a text that Python ships, computed by the fused runner with each KV
dtype. "Error" is that of the logits from those with the first KV dtype named, root mean square
relative to their spread; "same" how often the likeliest token, which greedy decoding takes, is the
same one.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import numpy as np

from inflight.api.config import InflightConfig
from inflight.checkpoint import prepare_checkpoint
from inflight.model.accuracy import Logits, TextReader, deviation, negative_log_likelihoods
from inflight.model.fused.load import build_fused_runner
from inflight.native.library import load_native
from inflight.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 8
"""More than English takes in any tokenizer that knows it."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the KV dtypes.")
    parser.add_argument("--model-dir", default="", help="empty: the embedded model")
    parser.add_argument("--dtype", default="bf16", help="of weights and activations")
    parser.add_argument("--kv", nargs="*", default=["bf16", "fp32", "int8"])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--num-windows", type=int, default=2)
    options = parser.parse_args()
    checkpoint = prepare_checkpoint(options.model_dir, "", progress=print)
    tokenizer = Tokenizer.from_directory(checkpoint.directory)
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    num_tokens = options.window * options.num_windows
    ids = tokenizer.encode(text[: num_tokens * CHARS_PER_TOKEN])[:num_tokens]
    windows = [ids[i : i + options.window] for i in range(0, num_tokens, options.window)]
    reference: Logits | None = None
    print(f"{'KV':6}{'bytes/token':>13}{'perplexity':>12}{'error':>10}{'same':>9}")
    for kv in options.kv:
        config = InflightConfig(
            dtype=options.dtype, kv_cache_dtype=kv, max_num_tokens=options.window
        )
        runner = build_fused_runner(checkpoint.directory, config, load_native(""))
        reader = TextReader(runner, window=options.window, tokens_per_block=32)
        rows = [reader.logits(window) for window in windows]
        losses = [
            negative_log_likelihoods(logits, window)
            for logits, window in zip(rows, windows, strict=True)
        ]
        logits = np.concatenate(rows)
        reference = logits if reference is None else reference
        found = deviation(logits, reference)
        perplexity = np.exp(np.concatenate(losses).mean())
        print(
            f"{kv:6}{runner.spec.kv_bytes_per_token:13}{perplexity:12.3f}"
            f"{found.error:10.4f}{found.agreement:9.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
