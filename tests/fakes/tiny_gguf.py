"""A tiny llama as a GGUF file, its weights in floats or in quantized blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

END_TOKEN = "<|end|>"
LETTERS = sorted(ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll")]
TOKENS = [*LETTERS, *("".join(pair) for pair in MERGES), END_TOKEN]
END_ID = len(TOKENS) - 1
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
    )
    return LlamaForCausalLM(config).eval()


def gguf_tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Weights under GGUF's names; it interleaves the halves that a rotary embedding pairs."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        projection = name.split(".")[-2]
        if projection in heads:
            halves = weight.reshape(heads[projection], 2, -1, weight.shape[1])
            weight = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
        yield names.get_name(name, try_suffixes=(".weight",)), weight


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    kind_of: Callable[[str], gguf.GGMLQuantizationType | None] = lambda name: None,
) -> None:
    """``kind_of``: in which blocks the tensor of a GGUF name is stored; None: in fp32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * END_ID + [gguf.TokenType.CONTROL])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(END_ID)
    writer.add_eos_token_id(END_ID)
    writer.add_unk_token_id(END_ID)
    writer.add_pad_token_id(END_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in gguf_tensors(model):
        kind = kind_of(name)
        if kind is None:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
