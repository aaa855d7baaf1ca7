"""Routing, the linears of experts and the sum of their results, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from inflight.kernels.combine import combine
from inflight.kernels.expert_linears import GateActivation, expert_gate_ups, expert_linears
from inflight.kernels.routing import CHOICES, Routing, route
from inflight.model.device.linears import quantize_rows
from tests.interpreter.case import (
    DTYPES,
    Case,
    exact,
    excess,
    poisoned,
    random,
    rounding,
    seeded,
)


def expert_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield from _route_cases(dtype)
        yield from _linear_cases(dtype)
        yield from _combine_cases(dtype)


# Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedShape:
    num_rows: int
    num_experts: int
    num_chosen: int
    num_shared: int = 0
    of_chosen: bool = False
    hard_rows: bool = False
    """Among them are rows with equal logits, with NaN and with infinities."""

    @property
    def words(self) -> str:
        kind = "the chosen" if self.of_chosen else "all"
        words = f"{self.num_rows} rows, {self.num_chosen} of {self.num_experts} experts"
        words += ", a shared one" * self.num_shared + f", softmax of {kind}"
        return words + ", ties, NaN and infinities" * self.hard_rows


ROUTED = (
    RoutedShape(num_rows=1, num_experts=8, num_chosen=2, of_chosen=True),
    RoutedShape(num_rows=19, num_experts=60, num_chosen=4, num_shared=1),
    RoutedShape(num_rows=CHOICES // 8 + 9, num_experts=128, num_chosen=8, of_chosen=True),
    RoutedShape(num_rows=3, num_experts=4, num_chosen=4),
    RoutedShape(num_rows=5, num_experts=1, num_chosen=1),
    RoutedShape(num_rows=9, num_experts=6, num_chosen=2, num_shared=1, hard_rows=True),
    RoutedShape(num_rows=9, num_experts=6, num_chosen=3, of_chosen=True, hard_rows=True),
)


def _route_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ROUTED:
        yield Case(
            kernel="route",
            dtype=dtype,
            shape=shape.words,
            sizes={"experts": shape.num_experts, "chosen": shape.num_chosen},
            run=partial(_run_route, dtype, shape),
        )


def _run_route(dtype: torch.dtype, shape: RoutedShape, device: torch.device) -> float:
    width = shape.num_experts + shape.num_shared
    # Rows lie apart, and what lies between them is not theirs.
    logits = poisoned(shape.num_rows, width + 3, dtype=dtype, device=device)[:, :width]
    logits.copy_(3 * random(seeded(shape.num_experts), shape.num_rows, width))
    if shape.hard_rows:
        logits[1] = 0.5
        logits[3, 2] = torch.nan
        logits[4] = -torch.inf
        logits[5, :2] = torch.inf
        logits[6, 1:] = -torch.inf
        logits[7] = torch.nan
    routing = _poisoned_routing(shape.num_rows, shape, device)
    route(logits, routing, is_softmax_of_chosen=shape.of_chosen)
    want = _routed(logits.double().cpu(), shape)
    return max(
        exact(routing.experts, want.experts),
        exact(routing.choices, want.choices),
        exact(routing.ends, want.ends),
        exact(routing.weights.isnan(), want.weights.isnan()),
        excess(routing.weights.nan_to_num(), want.weights.nan_to_num(), 2e-6),
    )


def _routed(logits: Tensor, shape: RoutedShape) -> Routing:
    """With float64 weights. NaN counts as -infinity where experts are chosen."""
    of_experts = logits[:, : shape.num_experts]
    order = of_experts.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : shape.num_chosen]
    weights = of_experts.softmax(-1).gather(1, chosen)
    if shape.of_chosen:
        weights = weights / weights.sum(-1, keepdim=True)
    if shape.num_shared:
        weights = torch.cat((weights, logits[:, -1:].sigmoid()), dim=1)
    return _together(chosen, weights, shape.num_experts)


def _together(chosen: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """The routing of tokens whose experts are known: [T, k] on the CPU."""
    flat = chosen.flatten()
    return Routing(
        weights=weights,
        experts=chosen.int(),
        choices=flat.argsort(stable=True).int(),
        ends=flat.bincount(minlength=num_experts).cumsum(0).int(),
    )


def _poisoned_routing(num_rows: int, shape: RoutedShape, device: torch.device) -> Routing:
    routing = Routing.allocate(
        num_rows,
        num_experts=shape.num_experts,
        num_chosen=shape.num_chosen,
        num_shared=shape.num_shared,
        device=device,
    )
    routing.weights.fill_(torch.nan)
    for integers in (routing.experts, routing.choices, routing.ends):
        integers.fill_(-(1 << 30))
    return routing


def _on(routing: Routing, device: torch.device) -> Routing:
    return Routing(
        weights=routing.weights.float().to(device),
        experts=routing.experts.to(device),
        choices=routing.choices.to(device),
        ends=routing.ends.to(device),
    )


# Linears


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    num_rows: int
    num_experts: int
    num_chosen: int
    depth: int
    width: int
    chosen: str = "at random"
    """Which experts tokens go to."""
    activation: GateActivation = "silu"
    has_scales: bool = False
    """The weights are fp8."""

    @property
    def sizes(self) -> dict[str, int]:
        return {"experts": self.num_experts, "depth": self.depth, "width": self.width}

    @property
    def words(self) -> str:
        return (
            f"{self.num_rows} rows, {self.num_chosen} of {self.num_experts} experts {self.chosen}, "
            f"{self.depth} to {self.width}" + ", weights in fp8" * self.has_scales
        )

    def routing(self, generator: torch.Generator) -> Routing:
        shape = (self.num_rows, self.num_experts)
        if self.chosen == "that are the last ones":
            scores = torch.arange(float(self.num_experts)).expand(shape)
        elif self.chosen == "but every second":
            scores = random(generator, *shape)
            scores[:, ::2] = -torch.inf
        else:
            scores = random(generator, *shape)
        chosen = scores.topk(self.num_chosen).indices
        return _together(chosen, torch.ones(chosen.shape), self.num_experts)


LINEARS = (
    LinearShape(num_rows=1, num_experts=8, num_chosen=2, depth=128, width=64),
    LinearShape(num_rows=40, num_experts=5, num_chosen=2, depth=200, width=100),
    LinearShape(
        num_rows=21, num_experts=12, num_chosen=3, depth=64, width=32, chosen="but every second"
    ),
    LinearShape(
        num_rows=35, num_experts=60, num_chosen=1, depth=96, width=40,
        chosen="that are the last ones", activation="gelu_tanh",
    ),
    LinearShape(num_rows=90, num_experts=3, num_chosen=2, depth=80, width=72),
    LinearShape(
        num_rows=150, num_experts=4, num_chosen=1, depth=64, width=130,
        chosen="that are the last ones", activation="gelu_tanh",
    ),
    LinearShape(num_rows=3, num_experts=8, num_chosen=2, depth=128, width=64, has_scales=True),
    LinearShape(
        num_rows=150, num_experts=4, num_chosen=2, depth=200, width=100,
        chosen="but every second", activation="gelu_tanh", has_scales=True,
    ),
)  # fmt: skip


def _linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape in LINEARS:
        yield Case(
            kernel="expert_gate_ups",
            dtype=dtype,
            shape=f"{shape.words}, {shape.activation}",
            sizes=shape.sizes,
            run=partial(_run_gate_ups, dtype, shape),
        )
        yield Case(
            kernel="expert_linears",
            dtype=dtype,
            shape=shape.words,
            sizes=shape.sizes,
            run=partial(_run_linears, dtype, shape),
        )


def _run_gate_ups(dtype: torch.dtype, shape: LinearShape, device: torch.device) -> float:
    generator = seeded(shape.depth)
    routing = shape.routing(generator)
    x = random(generator, shape.num_rows, shape.depth).to(device, dtype)
    weight, scales = _weights(generator, routing, (2 * shape.width, shape.depth), dtype, shape)
    out = poisoned(len(routing.choices), shape.width, dtype=dtype, device=device)
    on_device = weight.to(device), None if scales is None else scales.to(device)
    expert_gate_ups(
        x, on_device[0], _on(routing, device), out, shape.activation, scales=on_device[1]
    )
    choices = routing.choices.long()
    rows = x.double().cpu()[choices // shape.num_chosen]
    products = _products(rows, weight, scales, routing.experts.flatten()[choices])
    gate, up = products.chunk(2, dim=1)
    if shape.activation == "silu":
        want = functional.silu(gate) * up
    else:
        want = functional.gelu(gate, approximate="tanh") * up
    return excess(out, want, 2 * rounding(dtype, device))


def _run_linears(dtype: torch.dtype, shape: LinearShape, device: torch.device) -> float:
    generator = seeded(shape.width)
    routing = shape.routing(generator)
    x = random(generator, len(routing.choices), shape.depth).to(device, dtype)
    weight, scales = _weights(generator, routing, (shape.width, shape.depth), dtype, shape)
    out = poisoned(len(routing.choices), shape.width, dtype=dtype, device=device)
    on_device = weight.to(device), None if scales is None else scales.to(device)
    expert_linears(x, on_device[0], _on(routing, device), out, scales=on_device[1])
    choices = routing.choices.long()
    want = torch.empty(out.shape, dtype=torch.double)
    experts = routing.experts.flatten()[choices]
    want[choices] = _products(x.double().cpu(), weight, scales, experts)
    return excess(out, want, 2 * rounding(dtype, device))


def _weights(
    generator: torch.Generator,
    routing: Routing,
    size: tuple[int, int],
    dtype: torch.dtype,
    shape: LinearShape,
) -> tuple[Tensor, Tensor | None]:
    """With their scales, on the CPU; NaN for experts without rows: they are not read."""
    weight: Tensor = random(generator, len(routing.ends), *size) * size[1] ** -0.5
    unread = routing.ends.diff(prepend=routing.ends.new_zeros(1)) == 0
    if not shape.has_scales:
        weight[unread] = torch.nan
        return weight.to(dtype), None
    weight *= 10.0 ** torch.linspace(-2, 2, size[0])[:, None]
    numbers, scales = quantize_rows(weight)
    scales[unread] = torch.nan
    numbers.view(torch.uint8)[unread] = 0x7F  # NaN
    return numbers, scales.squeeze(-1)


def _products(rows: Tensor, weight: Tensor, scales: Tensor | None, experts: Tensor) -> Tensor:
    """float64, each row times the weights of its expert."""
    numbers = weight.double() if scales is None else weight.double() * scales.double()[..., None]
    return torch.einsum("rk,rnk->rn", rows, numbers[experts.long()])


# Sums


def _combine_cases(dtype: torch.dtype) -> Iterator[Case]:
    for num_chosen, width, has_shared in ((1, 64, True), (2, 1100, False), (8, 96, True)):
        words = f"{num_chosen} results of width {width}" + " and a shared one" * has_shared
        run = partial(_run_combine, dtype, num_chosen, width, has_shared=has_shared)
        sizes = {"width": width, "results of a row": num_chosen + has_shared}
        yield Case(kernel="combine", dtype=dtype, shape=words, sizes=sizes, run=run)


def _run_combine(
    dtype: torch.dtype, num_chosen: int, width: int, device: torch.device, *, has_shared: bool
) -> float:
    """A row of NaN spoils no other."""
    generator, num_rows = seeded(width), 4
    weights = random(generator, num_rows, num_chosen + has_shared)
    chosen = torch.arange(num_chosen).expand(num_rows, -1)
    routing = _together(chosen, weights, num_chosen)
    results = random(generator, num_rows * num_chosen, width).to(device, dtype)
    results[num_chosen : 2 * num_chosen] = torch.nan
    shared = random(generator, num_rows, width).to(device, dtype) if has_shared else None
    out = poisoned(num_rows, width, dtype=dtype, device=device)
    combine(results, _on(routing, device), shared, out)
    parts = results.double().cpu().view(num_rows, num_chosen, width)
    if shared is not None:
        parts = torch.cat((parts, shared.double().cpu()[:, None]), dim=1)
    want = (parts * weights.double()[..., None]).sum(1)
    whole = torch.tensor([0, 2, 3])
    return max(
        excess(out[whole.to(device)], want[whole], rounding(dtype, device)),
        0.0 if bool(out[1].isnan().all()) else torch.inf,
    )
