"""The quantized tensors of a GGUF file, kept as they are stored beside the dequantized ones.

The converter writes them into ``GGUF_BLOCKS_FILE`` of the checkpoint folder, a safetensors file:
under the name of each weight its blocks, uint8[n, k / 32, block_bytes], rows in the checkpoint's
order; the file's metadata gives the kind of every quantized weight (q4_1, q6_k, ...), also of those
without blocks because no kernel runs them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.checkpoint.files import GGUF_BLOCKS_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from inflight.native.gguf_blocks import GgufBlocks

_FLOAT_KINDS = frozenset({"f64", "f32", "f16", "bf16"})


def save_gguf_blocks(model: Any, source: Path, target: Path) -> None:
    """``model``: transformers' model of the GGUF file ``source``, dequantized to fp32."""
    from safetensors.torch import save_file

    kinds: dict[str, str] = {}
    blocks: dict[str, Tensor] = {}
    for name, weight, tensor in _quantized(model, source):
        kinds[name] = tensor.tensor_type.name.lower()
        same = _blocks_of(weight, tensor, kinds[name], _head_counts(model.config))
        if same is not None:
            blocks[name] = same.blocks.contiguous()
    if kinds:
        save_file(blocks, target / GGUF_BLOCKS_FILE, metadata=kinds)


def _quantized(model: Any, source: Path) -> Iterator[tuple[str, Tensor, Any]]:
    """(name, weight, GGUF tensor) of each weight of the model that the file has quantized."""
    import gguf

    reader = gguf.GGUFReader(str(source))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.get_field("general.architecture").contents()
    by_name = {name: architecture_id for architecture_id, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in by_name:
        return
    names = gguf.get_tensor_name_map(by_name[architecture], model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        tensor = stored.get(names.get_name(name, try_suffixes=(".weight",)))
        if tensor is not None and tensor.tensor_type.name.lower() not in _FLOAT_KINDS:
            yield name, weight, tensor


def _blocks_of(
    weight: Tensor, tensor: Any, kind: str, head_counts: tuple[int, ...]
) -> GgufBlocks | None:
    """The blocks whose values are exactly those of ``weight``, in its order; None: there are none.

    llama's files have the rows of queries and keys in another order. Whether these are such is not
    asked of the architecture but seen in the numbers.
    """
    import torch

    from inflight.native.gguf_blocks import BLOCK_FORMATS, GROUP_SIZE, GgufBlocks

    if kind not in BLOCK_FORMATS or weight.dim() != 2 or weight.shape[1] % GROUP_SIZE:
        return None
    blocks = GgufBlocks.from_bytes(tensor.data, kind, *weight.shape)
    if torch.equal(blocks.dequantize(), weight):
        return blocks
    for num_heads in head_counts:
        if blocks.n % (2 * num_heads) == 0:
            turned = blocks.without_rope_order(num_heads)
            if torch.equal(turned.dequantize(), weight):
                return turned
    return None


def _head_counts(config: Mapping[str, Any] | Any) -> tuple[int, ...]:
    counts = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    return tuple(dict.fromkeys(count for count in counts if count))
