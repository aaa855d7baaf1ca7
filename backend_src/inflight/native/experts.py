"""The operations of mixtures of experts: routing, the linears of groups of rows, the weighted sum.

``NativeExperts`` and ``TorchExperts`` have the same methods and promise the same results up to
rounding. All tensors are contiguous and on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.native.library import Int, NativeLibrary, Pointer
from inflight.native.linear import Activation, LinearOps, call_code
from inflight.native.packed import PackedLinear


@dataclass(frozen=True, eq=False)
class LinearGroup:
    """One linear for each of E groups of rows; all of one shape."""

    members: tuple[PackedLinear, ...]

    @cached_property
    def addresses(self) -> npt.NDArray[np.int64]:
        """int64[E], for the C functions, as long as this object lives."""
        return np.array([packed.native_address for packed in self.members], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Where the rows of T tokens go, each to k of E experts, and with ``num_shared`` = 1 to the
    shared expert as well.

    Results are rows too: first T * k of the experts, those of an expert together, then T of the
    shared expert in the order of the tokens.
    """

    num_experts: int
    num_shared: int
    weights: Tensor
    """float32[T, k + num_shared]: of each of a token's results, the shared one last."""
    places: Tensor
    """int64[T, k + num_shared]: which row that result is."""
    tokens: Tensor
    """int64[T * k]: whose result a row of the experts is."""
    ends: Tensor
    """int64[E]: the row after the last one of each expert; the first expert starts at 0."""

    @classmethod
    def allocate(
        cls, num_rows: int, *, num_experts: int, num_chosen: int, num_shared: int
    ) -> Routing:
        """``num_shared``: 0 or 1."""
        width = num_chosen + num_shared
        return cls(
            num_experts=num_experts,
            num_shared=num_shared,
            weights=torch.empty(num_rows, width),
            places=torch.empty(num_rows, width, dtype=torch.int64),
            tokens=torch.empty(num_rows * num_chosen, dtype=torch.int64),
            ends=torch.empty(num_experts, dtype=torch.int64),
        )

    @property
    def num_chosen(self) -> int:
        """k."""
        return self.weights.shape[1] - self.num_shared

    def first(self, num_rows: int) -> Routing:
        """The same memory for fewer tokens."""
        return Routing(
            num_experts=self.num_experts,
            num_shared=self.num_shared,
            weights=self.weights[:num_rows],
            places=self.places[:num_rows],
            tokens=self.tokens[: num_rows * self.num_chosen],
            ends=self.ends,
        )


class ExpertOps(Protocol):
    def route(self, logits: Tensor, routing: Routing, *, is_softmax_of_chosen: bool) -> None:
        """Fills ``routing`` from float32[T, E + num_shared]: the experts of the k largest logits,
        of equal ones the lower number, with the softmax of all E logits, or of the chosen k, as
        weights; the weight of the shared expert is the sigmoid of the last logit."""

    def linears(self, x: Tensor, group: LinearGroup, ends: Tensor, out: Tensor) -> None:
        """out [R, n] = x [R, k] W^T, rows up to ``ends[0]`` by the first member of ``group``, from
        there to ``ends[1]`` by the second, and so on; dtypes as in ``LinearOps``. Weights of a
        member without rows are not read."""

    def gate_ups(
        self, x: Tensor, group: LinearGroup, ends: Tensor, out: Tensor, activation: Activation
    ) -> None:
        """As ``linears``, with ``gate_up`` of ``LinearOps``."""

    def combine(
        self, results: Tensor, routing: Routing, out: Tensor, *, accumulate: bool = False
    ) -> None:
        """out float32[T, n] = the sum of each token's results, float32[R, n], times their
        weights; with ``accumulate`` it is added to ``out``."""


class NativeExperts:
    def __init__(self, library: NativeLibrary) -> None:
        self._route = library.function("inflight_route", Pointer, *[Int] * 5, *[Pointer] * 4)
        self._groups = library.function(
            "inflight_linear_groups", *[Pointer] * 2, Int, *[Pointer, Int] * 2, Int
        )
        self._combine = library.function(
            "inflight_combine", *[Pointer] * 3, *[Int] * 3, Pointer, Int
        )

    def route(self, logits: Tensor, routing: Routing, *, is_softmax_of_chosen: bool) -> None:
        num_rows = len(routing.weights)
        assert logits.shape == (num_rows, routing.num_experts + routing.num_shared)
        self._route(
            logits.data_ptr(),
            num_rows,
            routing.num_experts,
            routing.num_chosen,
            routing.num_shared,
            is_softmax_of_chosen,
            routing.weights.data_ptr(),
            routing.places.data_ptr(),
            routing.tokens.data_ptr(),
            routing.ends.data_ptr(),
        )

    def linears(self, x: Tensor, group: LinearGroup, ends: Tensor, out: Tensor) -> None:
        self._run(x, group, ends, out, None)

    def gate_ups(
        self, x: Tensor, group: LinearGroup, ends: Tensor, out: Tensor, activation: Activation
    ) -> None:
        self._run(x, group, ends, out, activation)

    def combine(
        self, results: Tensor, routing: Routing, out: Tensor, *, accumulate: bool = False
    ) -> None:
        num_rows, num_results = routing.weights.shape
        assert results.dtype == out.dtype == torch.float32 and out.is_contiguous()
        assert results.shape == (num_rows * num_results, out.shape[1]) and len(out) == num_rows
        self._combine(
            results.data_ptr(),
            routing.weights.data_ptr(),
            routing.places.data_ptr(),
            num_rows,
            num_results,
            out.shape[1],
            out.data_ptr(),
            accumulate,
        )

    def _run(
        self,
        x: Tensor,
        group: LinearGroup,
        ends: Tensor,
        out: Tensor,
        activation: Activation | None,
    ) -> None:
        one = group.members[0]
        assert one.is_gate_up == (activation is not None) and len(ends) == len(group.members)
        assert x.shape[1] == one.k and out.shape[1] == one.n and len(x) == len(out)
        assert x.is_contiguous() and out.is_contiguous()
        self._groups(
            group.addresses.ctypes.data,
            ends.data_ptr(),
            len(ends),
            x.data_ptr(),
            one.k * x.itemsize,
            out.data_ptr(),
            one.n * out.itemsize,
            call_code(x.dtype, out.dtype, activation),
        )


class TorchExperts:
    def __init__(self, linear: LinearOps) -> None:
        self._linear = linear

    def route(self, logits: Tensor, routing: Routing, *, is_softmax_of_chosen: bool) -> None:
        num_chosen, num_experts = routing.num_chosen, routing.num_experts
        of_experts = logits[:, :num_experts]
        # A stable sort, unlike topk, says which of equal logits comes first.
        chosen = of_experts.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
        weights = of_experts.softmax(-1).gather(1, chosen)
        if is_softmax_of_chosen:
            weights /= weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        routing.weights[:, :num_chosen] = weights
        routing.places[:, :num_chosen] = order.argsort().view_as(chosen)
        routing.tokens.copy_(order // num_chosen)
        routing.ends.copy_(chosen.flatten().bincount(minlength=num_experts).cumsum(0))
        if routing.num_shared:
            routing.weights[:, -1] = logits[:, -1].sigmoid()
            routing.places[:, -1] = torch.arange(len(order), len(order) + len(logits))

    def linears(self, x: Tensor, group: LinearGroup, ends: Tensor, out: Tensor) -> None:
        for packed, rows in _groups(group, ends):
            self._linear(x[rows], packed, out[rows])

    def gate_ups(
        self, x: Tensor, group: LinearGroup, ends: Tensor, out: Tensor, activation: Activation
    ) -> None:
        for packed, rows in _groups(group, ends):
            self._linear.gate_up(x[rows], packed, out[rows], activation)

    def combine(
        self, results: Tensor, routing: Routing, out: Tensor, *, accumulate: bool = False
    ) -> None:
        total = (results[routing.places] * routing.weights[..., None]).sum(1)
        if accumulate:
            out += total
        else:
            out.copy_(total)


def _groups(group: LinearGroup, ends: Tensor) -> Iterator[tuple[PackedLinear, slice]]:
    """Members that have rows, and which ones."""
    start = 0
    for packed, end in zip(group.members, ends.tolist(), strict=True):
        if end > start:
            yield packed, slice(start, end)
        start = end
