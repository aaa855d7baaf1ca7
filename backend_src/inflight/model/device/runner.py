"""DeviceRunner: the ModelRunner over a DeviceDecoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.api.kv_pools import KvPool
from inflight.batch.device_sampling import SampledRows, SamplingInputs
from inflight.errors import ConfigError
from inflight.kernels.kv_layout import SUPPORTED_TOKENS_PER_BLOCK
from inflight.model.device.faults import contained
from inflight.model.device.forward import DeviceDecoder
from inflight.model.device.graphs import GenerationGraphs
from inflight.model.device.kv_cache import DeviceKvCache
from inflight.model.device.rows import DeviceRows, RowBuffer
from inflight.model.device.runtime import DeviceRuntime, Outputs
from inflight.model.device.sampler import DeviceSampler
from inflight.model.device.sizing import NO_ROWS, every_rule
from inflight.model.device.staging import RowLimits
from inflight.model.dtypes import DTYPES
from inflight.model.runner import (
    ForwardOutput,
    MemoryUsage,
    ModelSpec,
    PackedInputs,
    nothing_beside,
)


class DeviceRunner:
    """Used by one thread at a time.

    In an iteration the host waits for the device once, for the sampled tokens, and not at all where
    none are sampled; once more for the logits of rows whose sampling is left to it.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        kv_cache: DeviceKvCache,
        sampler: DeviceSampler,
        runtime: DeviceRuntime,
        *,
        limits: RowLimits,
        graph_sizes: Sequence[int],
        kv_memory_bytes: int | None,
    ) -> None:
        """``kv_cache`` is new: ``allocate_kv_cache`` allocates it. ``graph_sizes``: rows that
        graphs are captured for, none: no graphs. ``kv_memory_bytes``: as in ModelSpec."""
        self.decoder = decoder
        self.kv_cache = kv_cache
        self._sampler = sampler
        self._runtime = runtime
        self._limits = limits
        self._graph_sizes = tuple(graph_sizes)
        self._buffer: RowBuffer | None = None
        self._graphs: GenerationGraphs | None = None
        self._logits = torch.empty(0)
        """Where all graphs leave their logits: they are large."""
        self._launched = nothing_beside
        """Of the forward that runs."""
        self._spec = ModelSpec(
            vocab_size=decoder.spec.vocab_size,
            max_position_embeddings=decoder.spec.max_position_embeddings,
            num_layers=len(decoder.spec.layers),
            kv_bytes_per_token=kv_cache.shape.bytes_per_token,
            supported_tokens_per_block=SUPPORTED_TOKENS_PER_BLOCK,
            dtype=next(name for name, dtype in DTYPES.items() if dtype is decoder.dtype),
            device=str(runtime.device),
            kv_memory_bytes=kv_memory_bytes,
            sampling_room=sampler.room,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def memory_usage(self) -> MemoryUsage:
        memory = self._runtime.memory
        return MemoryUsage(
            device=0 if memory is None else memory.in_use(), pinned=self.kv_cache.pinned_bytes
        )

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Rows that graphs were captured for. After ``allocate_kv_cache``."""
        assert self._graphs is not None
        return self._graphs.sizes

    def allocate_kv_cache(
        self, num_blocks: int, tokens_per_block: int, further_pools: Sequence[KvPool] = ()
    ) -> None:
        """Makes the storage, runs what iterations will run, so that none of them is the first, and
        captures graphs. Raises ConfigError as ModelRunner says, and where memory runs out."""
        self._spec.check_tokens_per_block(tokens_per_block, "the fused runner")
        assert not further_pools, "all layers share a pool here"
        assert self._buffer is None and tokens_per_block == self._limits.tokens_per_block
        self.kv_cache.allocate(num_blocks, tokens_per_block)
        try:
            with self._runtime.computing():
                self._make_ready()
        except torch.OutOfMemoryError:
            raise ConfigError(
                "kv_cache_free_gpu_mem_fraction: the KV cache leaves too little memory to compute"
            ) from None

    def forward(
        self, inputs: PackedInputs, launched: Callable[[], None] = nothing_beside
    ) -> ForwardOutput:
        with contained(self._runtime, f"the forward pass of {len(inputs.token_ids)} rows"):
            # The device would find out too, and be of no use to this process from then on.
            if inputs.token_ids.min() < 0 or inputs.token_ids.max() >= self.spec.vocab_size:
                raise IndexError(f"a token id is not below {self.spec.vocab_size}")
            self._launched = launched
            with self._runtime.computing():
                return self._forward(inputs)

    def copy_blocks(
        self, source_ids: npt.NDArray[np.int32], target_ids: npt.NDArray[np.int32], pool: int = 0
    ) -> None:
        assert pool == 0
        with contained(self._runtime, f"copying {len(source_ids)} KV blocks"):
            self.kv_cache.copy_blocks(source_ids, target_ids)

    @property
    def kv_block_format(self) -> str:
        return f"{self._spec.dtype} {self.kv_cache.block_format}"

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Sequence[npt.NDArray[np.uint8]]:
        with contained(self._runtime, f"reading {len(block_ids)} KV blocks"):
            return self.kv_cache.read_blocks(block_ids)

    def write_blocks(
        self, block_ids: npt.NDArray[np.int32], contents: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        with contained(self._runtime, f"writing {len(block_ids)} KV blocks"):
            self.kv_cache.write_blocks(block_ids, contents)

    def _make_ready(self) -> None:
        self._buffer = RowBuffer(self._limits, self._runtime)
        longest, most = self.decoder.max_seq_len, self._limits.max_batch_size
        # Kernels have versions for short sequences and for long ones.
        for num_rows, length in ((1, 1), (1, longest), (most, longest)):
            sampling = every_rule(num_rows, self.spec.vocab_size)
            rows = self._generations(num_rows, length, sampling)
            logits = self.decoder.forward(rows, self.kv_cache.storage)
            self._sample(logits, self.decoder.ops.likeliest(logits), sampling)
        self.kv_cache.make_ready()
        shape = (max(self._graph_sizes, default=0), self.spec.vocab_size)
        self._logits = torch.empty(shape, device=self._runtime.device)
        self._graphs = GenerationGraphs(self._runtime, self._graph_sizes, self._work_for)

    def _forward(self, inputs: PackedInputs) -> ForwardOutput:
        assert self._buffer is not None and self._graphs is not None
        bucket = self._graphs.bucket_for(inputs)
        if bucket is None:
            logits = self.decoder.forward(self._buffer.take(inputs), self.kv_cache.storage)
            return self._output((logits,), inputs)
        self._buffer.take_generations(inputs, bucket, self.kv_cache.scratch_block)
        return self._output(self._graphs.replay(bucket), inputs)

    def _output(self, computed: Outputs, inputs: PackedInputs) -> ForwardOutput:
        """``computed``: the logits, and of a graph what ``likeliest`` makes of them."""
        logits, *answers = computed
        num_wanted = len(inputs.logits_indices)
        if num_wanted == 0:
            return ForwardOutput(logits=np.empty((0, self.spec.vocab_size), dtype=np.float32))
        logits = logits[:num_wanted]
        if inputs.need_logits and inputs.sampling is None:
            return ForwardOutput(logits=self._to_host(logits).numpy())
        likeliest = (answers[0] if answers else self.decoder.ops.likeliest(logits))[:, :num_wanted]
        if inputs.sampling is not None:
            return self._sampled(logits, self._sample(logits, likeliest, inputs.sampling))
        ids, bits = self._to_host(likeliest).numpy()
        if np.isfinite(bits.view(np.float32)).all():
            return ForwardOutput(logits=None, likeliest=ids)
        return ForwardOutput(logits=self._to_host(logits).numpy())

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Everything that it comes from is under way."""
        self._launched()
        return self._runtime.to_host(tensor)

    def _sample(self, logits: Tensor, likeliest: Tensor, sampling: SamplingInputs) -> Tensor:
        """As ``DeviceSampler.sample``, of the rows that came with ``sampling``."""
        assert self._buffer is not None
        rows = self._buffer.sampling(sampling, self._sampler.counts)
        return self._sampler.sample(self.decoder.ops, logits, likeliest, rows)

    def _sampled(self, logits: Tensor, answers: Tensor) -> ForwardOutput:
        ids, bits, is_left = self._to_host(answers).numpy()
        left = np.flatnonzero(is_left)
        of_left = np.empty((0, self.spec.vocab_size), dtype=np.float32)
        if len(left):
            of_left = self._to_host(logits[torch.from_numpy(left)]).numpy()
        sampled = SampledRows(token_ids=ids, log_probs=bits.view(np.float32), left=left)
        return ForwardOutput(logits=of_left, sampled=sampled)

    def _generations(
        self, num_rows: int, longest: int, sampling: SamplingInputs | None = None
    ) -> DeviceRows:
        """So many rows of padding, where later iterations put theirs; ``longest``: as in
        DeviceRows."""
        assert self._buffer is not None
        inputs = replace(NO_ROWS, sampling=sampling)
        self._buffer.take_generations(inputs, num_rows, self.kv_cache.scratch_block)
        return self._buffer.generations(num_rows, longest)

    def _work_for(self, num_rows: int) -> Callable[[], Outputs]:
        """What a graph is captured of."""
        rows = self._generations(num_rows, self.decoder.max_seq_len)
        logits = self._logits[:num_rows]

        def work() -> Outputs:
            logits.copy_(self.decoder.forward(rows, self.kv_cache.storage))
            return logits, self.decoder.ops.likeliest(logits)

        return work
