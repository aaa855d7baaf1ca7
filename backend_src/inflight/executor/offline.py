"""The offline face: prompts in, whole answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inflight.api.request import Request, SamplingConfig
from inflight.api.response import FinishReason, Response
from inflight.errors import InvalidRequestError, RequestError
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """The whole answer to one prompt of ``Executor.generate``."""

    token_ids: tuple[int, ...]
    text: str
    """"" where the executor has no tokenizer."""
    finish_reason: FinishReason
    stop_reason: str
    num_input_tokens: int
    num_output_tokens: int
    log_probs: tuple[float, ...]
    """() unless the output_config asked for them."""


class _Awaitable(Protocol):
    def await_responses(
        self, request_id: int | None = None, timeout: float | None = None
    ) -> list[Response]: ...


def make_requests(
    prompts: Sequence[str | Sequence[int]],
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int,
    sampling_config: SamplingConfig,
    **fields: Any,
) -> list[Request]:
    """One Request a prompt. Raises InvalidRequestError for text without a tokenizer."""
    requests = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InvalidRequestError("prompt", prompt, "is text, and there is no tokenizer")
            ids = tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        requests.append(
            Request(
                input_token_ids=tuple(ids),
                max_tokens=max_tokens,
                sampling_config=sampling_config,
                **fields,
            )
        )
    return requests


def gather(executor: _Awaitable, request_ids: Sequence[int]) -> list[GenerationOutput]:
    """Waits for all of them; raises the first error among them when all have ended."""
    outputs, errors = [], []
    for request_id in request_ids:
        output = _gather_one(executor, request_id)
        if isinstance(output, RequestError):
            errors.append(output)
        else:
            outputs.append(output)
    if errors:
        raise errors[0]
    return outputs


def _gather_one(executor: _Awaitable, request_id: int) -> GenerationOutput | RequestError:
    whole = None
    while whole is None or not whole.is_final:
        for response in executor.await_responses(request_id):
            if response.error is not None:
                return response.error
            assert response.result is not None
            whole = response.result if whole is None else whole.merged_with(response.result)
    return GenerationOutput(
        token_ids=whole.output_token_ids,
        text=whole.text,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        num_input_tokens=whole.num_input_tokens,
        num_output_tokens=whole.num_output_tokens,
        log_probs=whole.log_probs,
    )
