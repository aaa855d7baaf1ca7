"""The kernels as torch custom ops with fake kernels, for models that are compiled.

After ``register_torch_ops`` there are ``torch.ops.inflight.linear``, ``gate_up``, ``rms_norm`` and
``attend`` (torch_attention.py), which torch.compile and torch.export take as they are. They return
new tensors, and take the parts of a PackedLinear, since an op's arguments are tensors and numbers.
The engine itself calls the
library directly: through torch's dispatcher a call takes 16 microseconds, by ctypes 3 (``--calls``
of ``tests/benchmarks/native_linear_speed.py``), and an iteration makes two hundred.
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
    "gate_up": ("(Tensor x, Tensor data, Tensor? bias, str kind, int n, str activation) -> Tensor"),
    "rms_norm": "(Tensor x, Tensor weight, float epsilon) -> Tensor",
}


@cache
def register_torch_ops(library: NativeLibrary) -> None:
    """Makes the ops known to torch, once in a process.

    ``linear``: [.., n] in x's dtype = x [.., k] W^T + bias, for ``data`` and ``bias`` of a
    PackedLinear of ``kind`` with k = x.shape[-1]. ``gate_up``: the same for one that is a gate and
    its up projection, as in LinearOps. ``rms_norm``: x / sqrt(mean(x^2) + epsilon) * weight, all
    fp32, rows of a multiple of 16. They raise CheckpointError when ``data`` or ``bias`` has another
    size, and ValueError for other dtypes and widths than said.
    """
    implementation = _Implementation(library)
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"inflight::{name}", schema)
        torch.library.impl(f"inflight::{name}", "CPU", getattr(implementation, name))
    torch.library.register_fake("inflight::linear", _fake_linear)
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
        _check(x, torch.float32, torch.bfloat16)
        packed = PackedLinear(kind=kind, n=n, k=x.shape[-1], is_gate_up=False, data=data, bias=bias)
        out = x.new_empty(*x.shape[:-1], n)
        self._linear(x.contiguous(), packed, out)
        return out

    def gate_up(
        self,
        x: Tensor,
        data: Tensor,
        bias: Tensor | None,
        kind: WeightKind,
        n: int,
        activation: Activation,
    ) -> Tensor:
        _check(x, torch.float32, torch.bfloat16)
        packed = PackedLinear(kind=kind, n=n, k=x.shape[-1], is_gate_up=True, data=data, bias=bias)
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


def _check(tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{tensor.dtype} is none of {', '.join(map(str, dtypes))}")


def _fake_linear(x: Tensor, data: Tensor, bias: Tensor | None, kind: str, n: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _fake_gate_up(
    x: Tensor, data: Tensor, bias: Tensor | None, kind: str, n: int, activation: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _fake_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)
