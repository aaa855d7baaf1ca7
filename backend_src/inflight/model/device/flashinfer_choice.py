"""Whether FlashInfer or our own kernels attend: measured once for a card, kept beside the launches.

The two are compared as a layer runs them. What FlashInfer's plan takes is not counted: it is made
once for all layers of an iteration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inflight.errors import ConfigError, one_line
from inflight.kernels.attention import AttentionPlan, AttentionRows, attend
from inflight.kernels.language import triton
from inflight.kernels.measurements import read_entries, store_entry
from inflight.kernels.tuning import (
    CONTEXT_LOADS,
    GENERATION_LOADS,
    AttentionShape,
    Load,
    LoadTensors,
    Measure,
    key,
    launches_for,
    make_load,
)
from inflight.model.device.flashinfer_attention import (
    BOTH_PHASES,
    FlashInferAttention,
    Phases,
    ScoreKind,
    import_flashinfer,
    unsupported_reason,
)
from inflight.model.device.flashinfer_rows import Int32Array
from inflight.model.device.runtime import DeviceRuntime
from inflight.model.fused.spec import DecoderSpec

_LOG = logging.getLogger(__name__)

TRIALS = (Load(sequences=2, rows=70, length=150), Load(sequences=3, rows=1, length=150))
MOST_DIFFERENCE = 0.05
"""Of outputs whose typical size is at most 1, in fp16 or bf16; wrong attention shows as about 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSequences:
    """``flashinfer_rows.Sequences``."""

    cu_seqlens_q: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    num_context_sequences: int

    @classmethod
    def of(cls, rows: AttentionRows) -> HostSequences:
        """Waits for the device."""
        return cls(
            cu_seqlens_q=rows.cu_seqlens_q.cpu().numpy(),
            context_lens=rows.context_lens.cpu().numpy(),
            block_tables=rows.block_tables.cpu().numpy(),
            num_context_sequences=rows.num_context_sequences,
        )


class Contest:
    """FlashInfer and our kernels on the same loads. Used inside of ``computing``."""

    def __init__(
        self,
        file: Path,
        shape: AttentionShape,
        kinds: Sequence[ScoreKind],
        runtime: DeviceRuntime,
    ) -> None:
        """``file``: of measured launches. Raises as FlashInferAttention does, and ConfigError for
        what else FlashInfer fails with."""
        with _blamed():
            self.attention = FlashInferAttention(shape, kinds, runtime)
        self._shape = shape
        self._kinds = tuple(kinds)
        self._device = runtime.device
        self._plan = AttentionPlan.allocate(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            launches=launches_for(file, shape, runtime.device),
            device=runtime.device,
        )

    def try_out(self) -> None:
        """Compiles both, where they are not, and compares what they compute. Raises ConfigError
        when FlashInfer does not run on this machine, or computes something else."""
        for load in TRIALS:
            tensors = make_load(load, self._shape, self._device)
            for kind in self._kinds:
                theirs, ours = torch.empty_like(tensors.out), torch.empty_like(tensors.out)
                self._ours(tensors, kind, ours)()
                with _blamed():
                    self._theirs(tensors, kind, theirs)()
                    difference = float((theirs.float() - ours.float()).abs().max())
                if not difference <= MOST_DIFFERENCE:
                    raise _refused(f"differs from our kernels by {difference:.2g}")

    def ratio(self, loads: Iterable[Load], measure: Measure) -> float:
        """FlashInfer's time by ours, as the geometric mean over loads and kinds. Raises ConfigError
        as ``try_out``."""
        logarithms = []
        for load in loads:
            tensors = make_load(load, self._shape, self._device)
            for kind in self._kinds:
                with _blamed():
                    theirs = measure(self._theirs(tensors, kind, tensors.out))
                ours = measure(self._ours(tensors, kind, tensors.out))
                logarithms.append(math.log(theirs / ours))
        return math.exp(sum(logarithms) / len(logarithms))

    def _theirs(self, tensors: LoadTensors, kind: ScoreKind, out: Tensor) -> Callable[[], None]:
        """Planned, and ready to run."""
        self.attention.plan(HostSequences.of(tensors.rows))
        run = (
            self.attention.attend_contexts
            if tensors.rows.num_context_sequences
            else self.attention.attend_generations
        )
        return lambda: run(tensors.query, tensors.cache, kind, out)

    def _ours(self, tensors: LoadTensors, kind: ScoreKind, out: Tensor) -> Callable[[], None]:
        query, cache, rows = tensors.query, tensors.cache, tensors.rows
        return lambda: attend(query, cache, rows, kind, out, self._plan)


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"attention_backend: flashinfer: {reason}")


@contextmanager
def _blamed() -> Iterator[None]:
    """Whatever a library of many versions raises in here becomes a ConfigError, but that there is
    no memory left."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _refused(one_line(error)) from error


def score_kinds(spec: DecoderSpec) -> tuple[ScoreKind, ...]:
    """Of its layers, each once."""
    kinds = (
        ScoreKind(spec.attention_scale, layer.sliding_window, spec.attention_softcap)
        for layer in spec.layers
    )
    return tuple(dict.fromkeys(kinds))


def chosen_phases(
    file: Path,
    shape: AttentionShape,
    kinds: Sequence[ScoreKind],
    runtime: DeviceRuntime,
    *,
    is_forced: bool,
) -> Phases | None:
    """What FlashInfer attends for: everything when it is forced, else what it was measured to be
    faster at; None: nothing. Raises ConfigError when it is forced and cannot."""
    reason = unsupported_reason(shape, runtime.device)
    if is_forced:
        if reason is not None:
            raise _refused(reason)
        Contest(file, shape, kinds, runtime).try_out()
        return BOTH_PHASES
    if reason is not None:
        return None
    try:
        phases = measured_phases(file, entry_name(shape, kinds, runtime.device))
    except ConfigError:  # compare has said so
        return None
    return phases if phases is not None and (phases.contexts or phases.generations) else None


def compare(
    file: Path,
    shape: AttentionShape,
    kinds: Sequence[ScoreKind],
    runtime: DeviceRuntime,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Measures for ``chosen_phases``, unless that was done before or FlashInfer cannot serve such
    heads here. Where it fails our kernels stay, a warning says so, and the next load tries again.
    Raises OSError when ``file`` cannot be written."""
    if unsupported_reason(shape, runtime.device) is not None:
        return
    try:
        entry = entry_name(shape, kinds, runtime.device)
        if measured_phases(file, entry) is not None:
            return
        on_start()
        contest = Contest(file, shape, kinds, runtime)
        contest.try_out()
        measure_phases(file, contest, entry)
    except ConfigError as error:
        _LOG.warning("%s: our own kernels attend", error)


def measure_phases(
    file: Path,
    contest: Contest,
    entry: str,
    *,
    measure: Measure | None = None,
    loads: tuple[Iterable[Load], Iterable[Load]] = (CONTEXT_LOADS, GENERATION_LOADS),
) -> None:
    """Writes under ``entry`` of ``file`` how the two compare on ``loads`` (contexts, generations).
    ``measure``: None for the card's own clock. Raises OSError when the file cannot be written,
    ConfigError as ``Contest.ratio``."""
    clock: Measure = triton.testing.do_bench if measure is None else measure
    contexts, generations = (contest.ratio(some, clock) for some in loads)
    store_entry(file, entry, {"contexts": contexts, "generations": generations})


def measured_phases(file: Path, entry: str) -> Phases | None:
    """Those in which FlashInfer was faster; None: that was not measured."""
    found = read_entries(file).get(entry)
    if not isinstance(found, dict):
        return None
    contexts, generations = found.get("contexts"), found.get("generations")
    if not isinstance(contexts, float) or not isinstance(generations, float):
        return None
    return Phases(contexts=contexts < 1.0, generations=generations < 1.0)


def entry_name(shape: AttentionShape, kinds: Iterable[ScoreKind], device: torch.device) -> str:
    """Changes with all that makes old measurements worthless, FlashInfer's version included.
    Raises ConfigError as ``import_flashinfer``."""
    version = getattr(import_flashinfer(), "__version__", "of no version")
    words = "; ".join(f"window {kind.sliding_window}, soft-cap {kind.softcap}" for kind in kinds)
    return f"flashinfer {version} by {key(shape, device)} ({words})"
