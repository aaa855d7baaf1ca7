"""Which experts a token goes to, with which weights, and the rows put together by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kernels.functions import sigmoid
from inflight.kernels.language import jit, power_of_2, tl

CHOICES = 2048
"""Choices that a program looks at together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Where T tokens go, each to k of E experts. Choice ``t * k + j`` is the j-th of token t.

    Rows of the experts are the choices in another order: those of expert 0, then of expert 1 and so
    on, and those of one expert in the order of the tokens.
    """

    weights: Tensor
    """float32[T, k + num_shared]: of each of a token's choices, the shared expert's last."""
    experts: Tensor
    """int32[T, k]: of each choice."""
    choices: Tensor
    """int32[T * k]: of each row."""
    ends: Tensor
    """int32[E]: the row after the last one of each expert; the first expert starts at 0."""

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        *,
        num_experts: int,
        num_chosen: int,
        num_shared: int,
        device: torch.device,
    ) -> Routing:
        """For T = ``num_rows``; ``num_shared``: 0 or 1. Nothing is written yet."""

        def integers(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        return cls(
            weights=torch.empty(num_rows, num_chosen + num_shared, device=device),
            experts=integers(num_rows, num_chosen),
            choices=integers(num_rows * num_chosen),
            ends=integers(num_experts),
        )

    @property
    def num_experts(self) -> int:
        return len(self.ends)

    @property
    def num_chosen(self) -> int:
        """k."""
        return self.experts.shape[1]

    @property
    def num_shared(self) -> int:
        return self.weights.shape[1] - self.num_chosen


def route(logits: Tensor, routing: Routing, *, is_softmax_of_chosen: bool) -> None:
    """Fills ``routing`` from [T, E + num_shared], fp32, fp16 or bf16 with the numbers of a row side
    by side: the experts of the k largest logits, of equal ones the lower number, with the softmax
    of all E logits, or of the chosen k, as weights; the weight of the shared expert is the sigmoid
    of the last logit. A row with NaN or infinity, or with nothing but -infinity, has k experts too;
    its weights are NaN, and no other row changes."""
    num_rows = len(routing.weights)
    if num_rows == 0:
        return
    num_experts, num_chosen = routing.num_experts, routing.num_chosen
    assert 1 <= num_chosen <= num_experts and routing.num_shared in (0, 1)
    assert logits.shape == (num_rows, num_experts + routing.num_shared) and logits.stride(1) == 1
    _choose[(num_rows,)](
        logits,
        routing.weights,
        routing.experts,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        NUM_CHOSEN=num_chosen,
        BLOCK=power_of_2(num_experts),
        IS_SOFTMAX_OF_CHOSEN=is_softmax_of_chosen,
        HAS_SHARED=routing.num_shared == 1,
        num_warps=1,
    )
    _put_together[(num_experts,)](
        routing.experts,
        routing.choices,
        routing.ends,
        len(routing.choices),
        BLOCK=CHOICES,
        num_warps=8,
    )


@jit()
def _choose(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    logits_stride: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SOFTMAX_OF_CHOSEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
) -> None:
    """Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    experts = tl.arange(0, BLOCK)
    is_expert = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    # A row with NaN still goes to NUM_CHOSEN different experts; its weights say what it is worth.
    numbers = tl.where(logits == logits, logits, float("-inf"))
    largest = tl.max(numbers, axis=0)
    # Infinity less infinity, said without computing it.
    subtracted = tl.where(tl.abs(largest) == float("inf"), float("nan"), largest)
    powers = tl.where(is_expert, tl.exp(logits - subtracted), 0.0)
    weights = powers / tl.sum(powers, axis=0)
    is_left = is_expert
    places = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(NUM_CHOSEN):
        largest = tl.max(tl.where(is_left, numbers, float("-inf")), axis=0)
        lowest = tl.min(tl.where(is_left & (numbers == largest), experts, BLOCK), axis=0)
        places = tl.where(experts == lowest, place, places)
        is_left &= experts != lowest
    is_chosen = is_expert & ~is_left
    if IS_SOFTMAX_OF_CHOSEN:
        weights /= tl.sum(tl.where(is_chosen, weights, 0.0), axis=0)
    weights_ptr += row * (NUM_CHOSEN + HAS_SHARED)
    tl.store(weights_ptr + places, weights, mask=is_chosen)
    tl.store(experts_ptr + row * NUM_CHOSEN + places, experts, mask=is_chosen)
    if HAS_SHARED:
        gate = tl.load(logits_ptr + NUM_EXPERTS).to(tl.float32)
        tl.store(weights_ptr + NUM_CHOSEN, sigmoid(gate))


@jit(("num_choices",))
def _put_together(
    experts_ptr: tl.tensor,
    choices_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_choices: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: (E,). An expert looks at every choice twice: how many are of experts before it, and
    which are its own. So no program waits for another, and the order is always the same."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    is_before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_choices, BLOCK):
        choices = first + lanes
        is_choice = choices < num_choices
        chosen = tl.load(experts_ptr + choices, mask=is_choice, other=0)
        is_before += (is_choice & (chosen < expert)).to(tl.int32)
    end = tl.sum(is_before, axis=0)
    for first in range(0, num_choices, BLOCK):
        choices = first + lanes
        is_choice = choices < num_choices
        chosen = tl.load(experts_ptr + choices, mask=is_choice, other=0)
        is_own = is_choice & (chosen == expert)
        counted = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(choices_ptr + end + counted - 1, choices, mask=is_own)
        end += tl.sum(is_own.to(tl.int32), axis=0)
    tl.store(ends_ptr + expert, end)
