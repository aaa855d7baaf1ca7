"""The experts of a layer on the kernels: the same as in torch, no row changes another, and the host
waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from inflight.kernels.launch import default_launches  # noqa: E402
from inflight.model.device.kernel_ops import KernelOps  # noqa: E402
from inflight.model.device.linears import quantize_rows  # noqa: E402
from inflight.model.device.ops import DeviceOps, ExpertTensors  # noqa: E402
from inflight.model.device.torch_ops import TorchOps  # noqa: E402
from inflight.model.fused.families import decoder_spec  # noqa: E402
from inflight.model.fused.spec import ExpertsSpec, MlpSpec  # noqa: E402
from tests.fakes.tiny_models import tiny_config  # noqa: E402

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
WIDTH, INNER, NUM_EXPERTS = 48, 40, 6


def kernel_ops() -> KernelOps:
    spec = decoder_spec(tiny_config("mixtral"))
    return KernelOps(spec, default_launches(16, torch.float32), CPU)


@pytest.fixture(params=["kernels", "torch"])
def ops(request: pytest.FixtureRequest) -> DeviceOps:
    return TorchOps() if request.param == "torch" else kernel_ops()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    spec: ExpertsSpec
    tensors: ExpertTensors
    x: Tensor
    logits: Tensor
    shared: Tensor | None

    def mixed(self, ops: DeviceOps, rows: slice = slice(None)) -> Tensor:
        shared = None if self.shared is None else self.shared[rows]
        return ops.mixed(self.x[rows], self.logits[rows], self.tensors, self.spec, shared)


def layer(
    num_rows: int, num_chosen: int, *, of_chosen: bool, has_shared: bool, is_fp8: bool = False
) -> Layer:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Layer(
        spec=ExpertsSpec(
            num_experts=NUM_EXPERTS,
            num_experts_per_token=num_chosen,
            mlp=MlpSpec(intermediate_size=INNER, activation="silu"),
            is_softmax_of_chosen=of_chosen,
        ),
        tensors=_tensors(
            0.2 * random(NUM_EXPERTS, 2 * INNER, WIDTH),
            0.2 * random(NUM_EXPERTS, WIDTH, INNER),
            is_fp8=is_fp8,
        ),
        x=random(num_rows, WIDTH),
        logits=3 * random(num_rows, NUM_EXPERTS + has_shared),
        shared=random(num_rows, WIDTH) if has_shared else None,
    )


def _tensors(gate_ups: Tensor, downs: Tensor, *, is_fp8: bool) -> ExpertTensors:
    if not is_fp8:
        return ExpertTensors(gate_ups=gate_ups, downs=downs)
    gate_ups, gate_up_scales = quantize_rows(gate_ups)
    downs, down_scales = quantize_rows(downs)
    return ExpertTensors(
        gate_ups=gate_ups,
        downs=downs,
        gate_up_scales=gate_up_scales.squeeze(-1),
        down_scales=down_scales.squeeze(-1),
    )


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("of_chosen", [False, True])
@pytest.mark.parametrize(("num_rows", "num_chosen"), [(0, 2), (1, 2), (13, 3), (100, 2)])
def test_kernels_and_torch_agree(
    num_rows: int, num_chosen: int, of_chosen: bool, has_shared: bool, is_fp8: bool
) -> None:
    some = layer(num_rows, num_chosen, of_chosen=of_chosen, has_shared=has_shared, is_fp8=is_fp8)
    got, want = some.mixed(kernel_ops()), some.mixed(TorchOps())
    assert got.shape == (num_rows, WIDTH)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_rows_of_padding_change_no_other_rows(ops: DeviceOps) -> None:
    """What fills up may hold anything, NaN too. It goes to experts as well, and torch's product of
    an expert's rows may round by how many there are: on CPUs with AVX2 alone it does."""
    some = layer(8, 2, of_chosen=True, has_shared=True)
    assert some.shared is not None
    some.x[5:], some.logits[5:6], some.shared[5:] = torch.nan, torch.nan, torch.inf
    some.logits[6:] = some.logits[0]
    together = some.mixed(ops)
    assert together[5:].isnan().all()
    again = layer(8, 2, of_chosen=True, has_shared=True).mixed(ops)
    if isinstance(ops, TorchOps):
        torch.testing.assert_close(together[:5], again[:5], atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(together[:5], again[:5])
    alone = some.mixed(ops, slice(0, 5))
    torch.testing.assert_close(together[:5], alone, atol=1e-6, rtol=1e-6)


class Waits(TorchDispatchMode):
    """Notes operations whose results the host must know before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_no_expert(ops: DeviceOps) -> None:
    """So that CUDA graphs can hold them. The reference does wait, and is seen doing it."""
    some = layer(13, 2, of_chosen=False, has_shared=True)
    with Waits() as noted:
        some.mixed(ops)
    assert bool(noted.seen) is isinstance(ops, TorchOps)
