"""rope_tables: what attention turns by in each layer, made once for layers that turn alike."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.model.fused.spec import DecoderSpec, RopeSpec
from inflight.native.elementwise import rope_table

_CPU = torch.device("cpu")


def rope_tables(
    spec: DecoderSpec, max_seq_len: int, device: torch.device = _CPU
) -> list[Tensor | None]:
    """Of each layer: float32[max_seq_len, rotary_dim] on ``device``, as ``rope_table`` makes it,
    the same tensor where the rope is the same; None for layers without rope."""
    tables: dict[RopeSpec | None, Tensor | None] = {None: None}
    for layer in spec.layers:
        if layer.rope is not None and layer.rope not in tables:
            frequencies = torch.tensor(layer.rope.inverse_frequencies)
            table = rope_table(frequencies, max_seq_len, layer.rope.attention_factor)
            tables[layer.rope] = table.to(device)
    return [tables[layer.rope] for layer in spec.layers]
