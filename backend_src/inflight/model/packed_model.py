"""PackedModel: transformers' own model class, driven with packed rows and our paged attention.

transformers dispatches attention by name to a registered function. There is one such function for
the process; it finds the model that called it by the ``_Door`` that every module of a PackedModel
carries, so any number of models live side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from inflight.errors import CheckpointError, one_line
from inflight.model.attention import AttentionBackend, AttentionRules, KvLayer
from inflight.model.runner import PackedInputs

ATTENTION_NAME = "inflight_paged"

_DOOR = "_inflight_door"

Handler = Callable[[nn.Module, Tensor, Tensor, Tensor, AttentionRules], Tensor]
"""(module, query [T, H, D], key [T, N, D], value [T, N, Dv], rules) -> [T, H, Dv]."""


class _Door:
    """Where one model's attention calls go while it runs a packed forward."""

    def __init__(self) -> None:
        self.handler: Handler | None = None

    @contextmanager
    def lead_to(self, handler: Handler) -> Iterator[None]:
        assert self.handler is None, "a forward is already running in this model"
        self.handler = handler
        try:
            yield
        finally:
            self.handler = None


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' contract: q, k, v are [1, heads, T, dim]; returns ([1, T, heads, dim], None).

    The mask is not used: rows are packed, and who sees whom follows from sequences and positions.
    """
    door: _Door = getattr(module, _DOOR)
    assert door.handler is not None
    scale = options.get("scaling")
    rules = AttentionRules(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return door.handler(module, query, key, value, rules)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


class PackedModel:
    """A loaded causal language model whose attention layers have been found and counted."""

    def __init__(self, model: Any) -> None:
        """``model``: as ``load_model`` returns it. Raises CheckpointError when its attention does
        not come through the interface once a layer, as the configuration describes the layers."""
        self._model = model
        self._device: torch.device = model.device
        self._takes_indices = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._door = _Door()
        for module in model.modules():
            setattr(module, _DOOR, self._door)
        self._use_attention(ATTENTION_NAME)
        self._layer_of: dict[nn.Module, int] = {}
        self.layers: tuple[KvLayer, ...] = ()
        """The K and V of each attention layer, in the order of computation."""
        self.vocab_size = 0
        """Columns of the logits."""
        self._discover()

    @property
    def architecture(self) -> str:
        return str(self._model.config.model_type)

    @property
    def max_position_embeddings(self) -> int:
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if not isinstance(limit, int):
            raise CheckpointError(
                f"architecture {self.architecture}: config.json has no max_position_embeddings"
            )
        return limit

    @property
    def has_experts(self) -> bool:
        """Rows choose between MLPs, so that rounding may send one to another. transformers calls
        these experts, or their classes so, in every architecture."""
        return any(
            "expert" in name or "Expert" in type(module).__name__
            for name, module in self._model.named_modules()
        )

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def forward(self, inputs: PackedInputs, backend: AttentionBackend) -> Tensor:
        """Logits of the rows in ``inputs.logits_indices``, [R, vocab_size], as the model makes
        them. ``backend`` holds the KV cache, allocated for ``layers``."""

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
        ) -> Tensor:
            return backend.attend(self._layer_of[module], query, key, value, rules)

        backend.begin_iteration(inputs)
        return self._run(
            torch.from_numpy(inputs.token_ids),
            torch.from_numpy(inputs.position_ids),
            torch.from_numpy(inputs.logits_indices),
            attend,
        )

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """int64[S, T] of S sequences of T tokens -> [S, T, vocab_size] by transformers' own eager
        attention, without cache and without our part: what ``forward`` is compared with."""
        self._use_attention("eager")
        try:
            with torch.inference_mode():
                logits: Tensor = self._model(
                    input_ids=token_ids.to(self._device), use_cache=False
                ).logits
        finally:
            self._use_attention(ATTENTION_NAME)
        return logits

    def _run(self, token_ids: Tensor, positions: Tensor, wanted: Tensor, to: Handler) -> Tensor:
        wanted = wanted.to(self._device)
        with torch.inference_mode(), self._door.lead_to(to):
            logits: Tensor = self._model(
                input_ids=token_ids.to(self._device)[None],
                position_ids=positions.to(self._device)[None],
                use_cache=False,
                **({"logits_to_keep": wanted} if self._takes_indices else {}),
            ).logits[0]
        # Some classes compute all rows whatever they are asked for.
        return logits if len(logits) == len(wanted) else logits[wanted]

    def _use_attention(self, name: str) -> None:
        self._model.set_attn_implementation(name)
        if self._model.config._attn_implementation != name:
            raise CheckpointError(
                f"architecture {self.architecture} is not served: its attention does not go "
                "through transformers' attention interface"
            )

    def _discover(self) -> None:
        """Runs one token and notes which modules ask for attention, and with what K and V."""
        layers: list[KvLayer] = []
        windows: list[int | None] = []

        def note(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
        ) -> Tensor:
            if module in self._layer_of:
                raise CheckpointError("an attention module is used for several layers")
            self._layer_of[module] = len(layers)
            layers.append(
                KvLayer(num_kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2])
            )
            windows.append(rules.sliding_window)
            return query.new_zeros((*query.shape[:2], value.shape[-1]))

        zero = torch.zeros(1, dtype=torch.int64)
        try:
            self.vocab_size = self._run(zero, zero, zero, note).shape[-1]
        except Exception as error:
            raise CheckpointError(
                f"architecture {self.architecture} is not served: it cannot be driven packed: "
                f"{one_line(error)}"
            ) from error
        self.layers, self.windows = tuple(layers), tuple(windows)
        self._check_layers(self.windows)

    def _check_layers(self, windows: Sequence[int | None]) -> None:
        """``windows``: the sliding window that each layer asked for, None for full attention."""
        config = self._model.config
        num_layers = getattr(config, "num_hidden_layers", None)
        if len(windows) != num_layers:
            raise CheckpointError(
                f"architecture {self.architecture} is not served: {len(windows)} of its "
                f"{num_layers} layers use transformers' attention interface"
            )
        # A window that is applied through the mask alone would be lost on us, and the probe is too
        # short to show it.
        layer_types = getattr(config, "layer_types", None) or ["unknown"] * len(windows)
        lost = [
            layer
            for layer, (kind, window) in enumerate(zip(layer_types, windows, strict=True))
            if kind == "sliding_attention" and window is None
        ]
        if lost:
            raise CheckpointError(
                f"architecture {self.architecture} is not served: layer {lost[0]} does not pass "
                "its sliding window to the attention interface"
            )
