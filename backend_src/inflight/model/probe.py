"""The probe: one small packed computation must equal the model's own plain forward.

It stands between a model whose code changed, or whose attention reads something that the plugin is
not given, or kernels that compute something else on this machine, and a service that answers
fluently and wrong.

One rule for every runner: of the rows of a course, three of four are as near to the plain forward
as rounding leaves them (``check_typical``), and every one is that of torch on the same weights
(``check_rows``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from inflight.errors import CheckpointError, one_line
from inflight.model.probe_course import Course, course_for

if TYPE_CHECKING:
    from inflight.model.attention import AttentionBackend
    from inflight.model.packed_model import PackedModel

TOLERANCE: Mapping[str, float] = {
    "fp32": 1e-3, "bf16": 0.25, "fp16": 0.05, "int8": 0.35, "int4": 0.6,
}  # fmt: skip
"""Largest typical error of the logits relative to their spread, by the dtype of the weights. Wrong
attention shows as about 1 or more; below these values is what rounding does.

Rounding the weights of a model may do more, where its attention is sharper than that of any trained
one: then the dtype is no good for this model, and refusing it is right."""

ROW_TOLERANCE: Mapping[str, float] = {
    "fp32": 1e-3, "bf16": 0.8, "fp16": 0.8, "int8": 0.8, "int4": 0.8,
}  # fmt: skip
"""Largest error of any row of logits beside torch's on the same weights. A row whose attention or
linears are wrong is off by about 1 or more; what rounding activations to bf16, or to 8 bits, does
to the rows that take it worst lies below half of this in the models that were tried."""

_TYPICAL = 0.75
"""Share of the rows that count where some may be off."""


def probe(model: PackedModel, backend: AttentionBackend) -> None:
    """Raises CheckpointError when the packed logits of transformers' classes are not their plain
    ones. ``backend`` is new and of no use afterwards."""
    course = course_for(model.max_position_embeddings)
    token_ids = course.token_ids(model.vocab_size)
    tokens_per_block = min(backend.supported_tokens_per_block, default=4)
    try:
        backend.allocate(
            model.layers,
            num_blocks=course.num_blocks(tokens_per_block),
            tokens_per_block=tokens_per_block,
        )
        packed = course.packed_logits(
            lambda inputs: model.forward(inputs, backend).cpu(), tokens_per_block, token_ids
        )
        plain = course.plain_logits(model.plain_logits, token_ids)
    except Exception as error:
        raise CheckpointError(
            f"architecture {model.architecture} is not served: the probe failed: {one_line(error)}"
        ) from error
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[model.dtype]
    check_typical(packed, plain, model.architecture, dtype)
    check_rows(packed, plain, model.architecture, dtype, flipping=flipping(course, model))


def flipping(course: Course, model: _MayHaveExperts) -> Sequence[Sequence[int]]:
    """Of the course's rows, as ``check_rows`` takes it."""
    return course.rows_by_phase if model.has_experts else ()


class _MayHaveExperts(Protocol):
    """A model, or its description."""

    @property
    def has_experts(self) -> bool: ...


def check_typical(packed: Tensor, plain: Tensor, architecture: str, dtype: str) -> float:
    """Both float32[rows, vocab_size]; ``dtype``: a key of TOLERANCE. Returns how far three rows of
    four differ at most, in fp32 how far any does.

    In low precision a near-tie can send a row of a mixture of experts to another expert, and
    quantizing moves some rows far, as no wrong attention would have it. Raises CheckpointError when
    it is more than rounding explains.
    """
    quantile = 1.0 if dtype == "fp32" else _TYPICAL
    deviation = float(_deviations(packed, plain).quantile(quantile, interpolation="higher"))
    _check(deviation, TOLERANCE[dtype], architecture, "packed and plain logits")
    return deviation


def check_rows(
    packed: Tensor,
    reference: Tensor,
    architecture: str,
    dtype: str,
    *,
    flipping: Sequence[Sequence[int]] = (),
) -> None:
    """Both float32[rows, vocab_size], of the same weights: every row counts.

    ``flipping``: of a mixture of experts, its rows in groups; in low precision a quarter of each
    may be off. Raises CheckpointError when a row differs by more than rounding explains.
    """
    deviations = _deviations(packed, reference)
    if flipping and dtype != "fp32":
        deviation = max(
            float(deviations[list(rows)].quantile(_TYPICAL, interpolation="higher"))
            for rows in flipping
        )
    else:
        deviation = float(deviations.max())
    _check(deviation, ROW_TOLERANCE[dtype], architecture, "logits of a row and torch's")


def _deviations(packed: Tensor, reference: Tensor) -> Tensor:
    """float32[rows]: the error of each row relative to its spread, inf where it is not finite."""
    error_of_rows = (packed.float() - reference).pow(2).mean(-1).sqrt()
    spread_of_rows = reference.std(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (error_of_rows / spread_of_rows).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _check(deviation: float, tolerance: float, architecture: str, what: str) -> None:
    if deviation > tolerance:
        raise CheckpointError(
            f"architecture {architecture} is not served: {what} differ by {deviation:.2g} of their "
            f"spread, more than {tolerance:g}"
        )
