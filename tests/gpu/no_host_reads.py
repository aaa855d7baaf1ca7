"""Drives decoder, kernels and sampler on tensors that have no memory: who reads one on the host
raises, so what runs through waits for nothing and can be captured.

    python tests/gpu/no_host_reads.py

Prints how many rows were computed so, and the kernels that were launched. No card is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backend_src")]

from tests.gpu.compile_kernels import recorded  # noqa: E402  (before any kernel)
from tests.gpu.steady_versions import (  # noqa: E402  (before any kernel)
    ITERATIONS,
    LONGEST,
    MODEL_TYPES,
    MOST,
    NUM_BLOCKS,
    TOKENS_PER_BLOCK,
    rows,
    some_rules,
)

# isort: split
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from inflight.api.config import InflightConfig  # noqa: E402
from inflight.kernels.kv_layout import KvShape  # noqa: E402
from inflight.kernels.launch import default_launches  # noqa: E402
from inflight.model.device.forward import DeviceDecoder  # noqa: E402
from inflight.model.device.kernel_ops import KernelOps  # noqa: E402
from inflight.model.device.plain_runtime import PlainRuntime  # noqa: E402
from inflight.model.device.rows import RowBuffer  # noqa: E402
from inflight.model.device.sampler import DeviceSampler  # noqa: E402
from inflight.model.device.sizing import limits_of  # noqa: E402
from inflight.model.device.weights import WeightFormat, load_device_weights  # noqa: E402
from inflight.model.fused.decoder_tensors import DecoderTensors  # noqa: E402
from inflight.model.fused.load import read_spec  # noqa: E402
from inflight.model.fused.spec import DecoderSpec  # noqa: E402
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_checkpoint  # noqa: E402

META = torch.device("meta")
DTYPE = torch.bfloat16
CONFIG = InflightConfig(
    max_batch_size=MOST, max_num_tokens=4 * MOST, tokens_per_block=TOKENS_PER_BLOCK
)


class Shapes:
    """A TensorSource of what has a shape alone."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=META)


class Model:
    def __init__(self, spec: DecoderSpec) -> None:
        shape = KvShape(
            num_layers=len(spec.layers),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=DTYPE,
        )
        limits = limits_of(CONFIG, LONGEST)
        form = WeightFormat(dtype=DTYPE)
        weights = load_device_weights(
            DecoderTensors(Shapes(), spec), spec, form, on_layer=lambda layer: None
        )
        self._ops = KernelOps(spec, default_launches(spec.head_dim, DTYPE), META)
        self._decoder = DeviceDecoder(spec, weights, self._ops, max_seq_len=LONGEST)
        self._sampler = DeviceSampler(limits.sampling_room, spec.vocab_size, META)
        self._buffer = RowBuffer(limits, PlainRuntime(META))
        self._storage = shape.allocate(NUM_BLOCKS, TOKENS_PER_BLOCK, META)

    def iterate(self, contexts: int, generations: int, length: int) -> int:
        """An iteration for each kind of sampling; returns how many rows were computed."""
        inputs, num_rows = rows(contexts, generations, length), 0
        for sampling in some_rules(contexts + generations):
            taken = self._buffer.take(replace(inputs, sampling=sampling))
            logits = self._decoder.forward(taken, self._storage)
            likeliest = self._ops.likeliest(logits)
            staged = self._buffer.sampling(sampling, self._sampler.counts)
            answers = self._sampler.sample(self._ops, logits, likeliest, staged)
            assert answers.device == META and logits.shape == (contexts + generations, VOCAB_SIZE)
            num_rows += len(inputs.token_ids)
        return num_rows


def main() -> None:
    num_rows = 0
    with tempfile.TemporaryDirectory() as folder, recorded() as versions, torch.inference_mode():
        for model_type in MODEL_TYPES:
            directory = tiny_checkpoint(Path(folder) / model_type, model_type)
            model = Model(read_spec(directory))
            for contexts, generations in ITERATIONS:
                for length in (1, LONGEST):
                    num_rows += model.iterate(contexts, generations, length)
    kernels = sorted({version.kernel.__name__ for version in versions.values()})
    print(json.dumps({"rows": num_rows, "kernels": kernels}))


if __name__ == "__main__":
    main()
