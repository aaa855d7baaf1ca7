"""The kernels as torch custom ops with fake kernels, for models that are compiled.

After ``register_torch_ops`` there are ``torch.ops.inflight.linear``, ``add_linear``, ``gate_up``,
``argmax``, ``rms_norm`` and ``attend`` (torch_attention.py), which torch.compile and torch.export
take as they are. They return new tensors but where said, and take the parts of a PackedLinear,
since an op's arguments are tensors and numbers. A residual is added to by the linear in front of a
norm (``add_linear``), as in the engine; the norm reads the sum.

The engine itself calls the library directly: through torch's dispatcher a call takes 16
microseconds, by ctypes 3 (``--calls`` of ``tests/benchmarks/native_linear_speed.py``), and an
iteration makes two hundred.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from inflight.native.elementwise import WIDTH_MULTIPLE, NativeElementwise
from inflight.native.library import NativeLibrary
from inflight.native.linear import Activation, NativeLinear
from inflight.native.packed import PackedLinear, WeightKind
from inflight.native.torch_attention import register_attend

_SCHEMAS = {
    "linear": "(Tensor x, Tensor data, Tensor? bias, str kind, int n) -> Tensor",
    "add_linear": (
        "(Tensor(a!) residual, Tensor x, Tensor data, Tensor? bias, str kind, int n) -> ()"
    ),
    "argmax": "(Tensor x, Tensor data, Tensor? bias, str kind, int n) -> Tensor",
    "gate_up": ("(Tensor x, Tensor data, Tensor? bias, str kind, int n, str activation) -> Tensor"),
    "rms_norm": "(Tensor x, Tensor weight, float epsilon) -> Tensor",
}


@cache
def register_torch_ops(library: NativeLibrary) -> None:
    """Makes the ops known to torch, once in a process.

    ``linear``: [.., n] in x's dtype = x [.., k] W^T + bias, for ``data`` and ``bias`` of a
    PackedLinear of ``kind`` with k = x.shape[-1]. ``add_linear``: the same, added to ``residual``,
    contiguous fp32[.., n]. ``argmax``: int32[..], the column of each row's largest result, the
    lowest of equal ones; the logits are never stored. ``gate_up``: as ``linear`` for one that is a
    gate and its up projection, as in LinearOps. ``rms_norm``: x / sqrt(mean(x^2) + epsilon) *
    weight, all fp32, rows of a multiple of 16. They raise CheckpointError when ``data`` or ``bias``
    has another size, and ValueError for other dtypes and shapes than said.
    """
    implementation = _Implementation(library)
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"inflight::{name}", schema)
        torch.library.impl(f"inflight::{name}", "CPU", getattr(implementation, name))
    torch.library.register_fake("inflight::linear", _fake_linear)
    torch.library.register_fake("inflight::add_linear", _fake_add_linear)
    torch.library.register_fake("inflight::argmax", _fake_argmax)
    torch.library.register_fake("inflight::gate_up", _fake_gate_up)
    torch.library.register_fake("inflight::rms_norm", _fake_rms_norm)
    register_attend(library)


class _Implementation:
    def __init__(self, library: NativeLibrary) -> None:
        self._linear = NativeLinear(library)
        self._elementwise = NativeElementwise(library)

    def linear(
        self, x: Tensor, data: Tensor, bias: Tensor | None, kind: WeightKind, n: int
    ) -> Tensor:
        packed = _packed(x, data, bias, kind, n)
        out = x.new_empty(*x.shape[:-1], n)
        self._linear(x.contiguous(), packed, out)
        return out

    def add_linear(
        self,
        residual: Tensor,
        x: Tensor,
        data: Tensor,
        bias: Tensor | None,
        kind: WeightKind,
        n: int,
    ) -> None:
        _check(residual, torch.float32)
        packed = _packed(x, data, bias, kind, n)
        if residual.shape != (*x.shape[:-1], n) or not residual.is_contiguous():
            raise ValueError(f"residual has to be contiguous {[*x.shape[:-1], n]}")
        self._linear(x.contiguous(), packed, residual, accumulate=True)

    def argmax(
        self, x: Tensor, data: Tensor, bias: Tensor | None, kind: WeightKind, n: int
    ) -> Tensor:
        packed = _packed(x, data, bias, kind, n)
        rows = x.contiguous().view(-1, packed.k)
        return self._linear.argmax(rows, packed).view(x.shape[:-1])

    def gate_up(
        self,
        x: Tensor,
        data: Tensor,
        bias: Tensor | None,
        kind: WeightKind,
        n: int,
        activation: Activation,
    ) -> Tensor:
        packed = _packed(x, data, bias, kind, n, is_gate_up=True)
        out = x.new_empty(*x.shape[:-1], n)
        self._linear.gate_up(x.contiguous(), packed, out, activation)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        _check(x, torch.float32)
        _check(weight, torch.float32)
        if x.shape[-1] % WIDTH_MULTIPLE or weight.shape != x.shape[-1:]:
            raise ValueError(f"rows of {x.shape[-1]} and a weight of {tuple(weight.shape)}")
        out = torch.empty(x.shape)
        rows = x.contiguous().view(-1, x.shape[-1])
        self._elementwise.rms_norm(rows, weight.contiguous(), epsilon, out.view(rows.shape))
        return out


def _packed(
    x: Tensor,
    data: Tensor,
    bias: Tensor | None,
    kind: WeightKind,
    n: int,
    *,
    is_gate_up: bool = False,
) -> PackedLinear:
    """What ``x`` is multiplied with."""
    _check(x, torch.float32, torch.bfloat16)
    return PackedLinear(kind=kind, n=n, k=x.shape[-1], is_gate_up=is_gate_up, data=data, bias=bias)


def _check(tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{tensor.dtype} is none of {', '.join(map(str, dtypes))}")


def _fake_linear(x: Tensor, data: Tensor, bias: Tensor | None, kind: str, n: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _fake_add_linear(
    residual: Tensor, x: Tensor, data: Tensor, bias: Tensor | None, kind: str, n: int
) -> None:
    """It returns nothing."""


def _fake_argmax(x: Tensor, data: Tensor, bias: Tensor | None, kind: str, n: int) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int32)


def _fake_gate_up(
    x: Tensor, data: Tensor, bias: Tensor | None, kind: str, n: int, activation: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _fake_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)
