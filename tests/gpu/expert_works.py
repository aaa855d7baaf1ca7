"""What tests/gpu/kernel_speed.py measures of experts: the shapes of Qwen3 30B-A3B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.kernels.combine import combine
from inflight.kernels.expert_linears import expert_gate_ups, expert_linears
from inflight.kernels.routing import Routing, route
from tests.gpu.kernel_works import DTYPE, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    num_experts: int
    num_chosen: int
    width: int
    inner: int
    generations: tuple[int, ...]
    """Rows of each iteration that is bound by the weights it reads."""
    contexts: tuple[int, ...]
    """Rows of each that is bound by its products."""


QWEN3 = ExpertSizes(
    num_experts=128,
    num_chosen=8,
    width=2048,
    inner=768,
    generations=(1, 64),
    contexts=(8192,),
)
SMALL_EXPERTS = ExpertSizes(
    num_experts=4, num_chosen=2, width=64, inner=32, generations=(1,), contexts=(70,)
)


def expert_works(sizes: ExpertSizes, device: torch.device) -> Iterator[Work]:
    gate_ups = _random(device, sizes.num_experts, 2 * sizes.inner, sizes.width)
    downs = _random(device, sizes.num_experts, sizes.width, sizes.inner)
    for num_rows in (*sizes.generations, *sizes.contexts):
        layer = _Layer(sizes, num_rows, gate_ups, downs)
        layer.route()
        is_context = num_rows in sizes.contexts
        if is_context:  # of few rows it is launches that take the time
            yield layer.routing_work()
        yield layer.products_work(is_context=is_context)


class _Layer:
    """The experts of a layer on so many rows, whose router is a random one."""

    def __init__(self, sizes: ExpertSizes, num_rows: int, gate_ups: Tensor, downs: Tensor) -> None:
        device = gate_ups.device
        num_results = num_rows * sizes.num_chosen
        self._gate_ups, self._downs = gate_ups, downs
        self._logits = torch.randn(num_rows, sizes.num_experts, device=device)
        self._x = _random(device, num_rows, sizes.width)
        self._inner = _random(device, num_results, sizes.inner)
        self._results = _random(device, num_results, sizes.width)
        self._out = torch.empty_like(self._x)
        self._routing = Routing.allocate(
            num_rows,
            num_experts=sizes.num_experts,
            num_chosen=sizes.num_chosen,
            num_shared=0,
            device=device,
        )
        self._words = f"{num_rows} rows, {sizes.num_chosen} of {sizes.num_experts} experts"

    def route(self) -> None:
        route(self._logits, self._routing, is_softmax_of_chosen=True)

    def routing_work(self) -> Work:
        """With the sum of the results: all that is not a product."""

        def run() -> None:
            self.route()
            combine(self._results, self._routing, None, self._out)

        return Work(
            what=f"route + combine, {self._words}",
            run=run,
            num_bytes=self._results.nbytes + self._out.nbytes,
        )

    def products_work(self, *, is_context: bool) -> Work:
        """After ``route``, which says whose weights are read."""
        weights = self._gate_ups[0].nbytes + self._downs[0].nbytes
        num_read = len(set(self._routing.experts.flatten().tolist()))
        operations = 2.0 * len(self._results) * weights / DTYPE.itemsize
        return Work(
            what=f"expert_gate_ups + expert_linears, {self._words}",
            run=self._multiply,
            num_bytes=0.0 if is_context else float(num_read * weights),
            operations=operations if is_context else 0.0,
            note="" if is_context else f"{num_read} experts have rows",
        )

    def _multiply(self) -> None:
        expert_gate_ups(self._x, self._gate_ups, self._routing, self._inner, "silu")
        expert_linears(self._inner, self._downs, self._routing, self._results)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)
