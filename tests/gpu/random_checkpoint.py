"""A Llama of random weights in a published shape, with a tokenizer, as a Hugging Face folder.

Nothing can be downloaded where the suite runs, and speed does not depend on what the weights say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

LLAMA_1B: Mapping[str, Any] = _COMMON | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""Llama 3.2 1B."""

TINY: Mapping[str, Any] = _COMMON | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""For the CPU stand-in."""


def make_checkpoint(
    folder: Path, shape: Mapping[str, Any], dtype: torch.dtype, device: str
) -> Path:
    """Writes config, weights and tokenizer. ``device``: where the weights are drawn."""
    folder.mkdir(parents=True)
    config = dict(shape) | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, size in _tensors(shape):
        weight = torch.ones(size, dtype=dtype)
        if len(size) > 1:
            drawn = torch.randn(size, generator=generator, device=device, dtype=dtype)
            weight = (drawn * 0.02).cpu()
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(folder, int(shape["vocab_size"]))
    return folder


def _tensors(shape: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, size in (("q", query), ("k", kv), ("v", kv)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, query)
        yield f"{prefix}.mlp.gate_proj.weight", (width, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (width, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, width)


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, and a word of its own for every further id: each id decodes to some text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<end>", *alphabet]
    words += [f"\u0120w{number}" for number in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
