"""Functions of numbers that kernels call; their exponentials never overflow."""

from __future__ import annotations

from inflight.kernels.language import jit, tl


@jit()
def sigmoid(x: tl.tensor) -> tl.tensor:
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@jit()
def tanh(x: tl.tensor) -> tl.tensor:
    """To about 1e-7, absolutely."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x >= 0, size, -size)


@jit()
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """``Activation`` of activations.py."""
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2z; 1.5957.. is 2 * sqrt(2 / pi).
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = tl.maximum(x, 0.0)
        if ACTIVATION == "relu2":
            y = y * y
    return y
