"""Which requests the engine takes at all: the limits of this engine, each refused by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.api.executor_config import CapacitySchedulerPolicy, ExecutorConfig
from inflight.api.kv_pools import KvPool, most_blocks
from inflight.api.request import Request
from inflight.errors import InvalidRequestError, UnsupportedRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What this engine was built with."""

    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    enable_chunked_context: bool
    vocab_size: int
    pools: tuple[KvPool, ...]
    tokens_per_block: int
    may_pause: bool

    @classmethod
    def of(
        cls, config: ExecutorConfig, *, vocab_size: int, pools: Sequence[KvPool]
    ) -> EngineLimits:
        return cls(
            max_seq_len=config.max_seq_len,
            max_num_tokens=config.max_num_tokens,
            max_beam_width=config.max_beam_width,
            enable_chunked_context=config.enable_chunked_context,
            vocab_size=vocab_size,
            pools=tuple(pools),
            tokens_per_block=config.kv_cache_config.tokens_per_block,
            may_pause=config.scheduler_config.capacity_scheduler_policy
            is CapacitySchedulerPolicy.MAX_UTILIZATION,
        )


def check_request(request: Request, limits: EngineLimits) -> None:
    """Raises InvalidRequestError or UnsupportedRequestError, naming the limit; changes nothing."""
    _check_support(request, limits)
    _check_lengths(request, limits)
    _check_ids("input_ids", request.input_token_ids, limits.vocab_size)
    for name, sequences in (
        ("stop_words_list", request.stop_token_sequences),
        ("bad_words_list", request.bad_words),
    ):
        for sequence in sequences:
            _check_ids(name, sequence, limits.vocab_size)
    _check_ids("end_id", request.end_ids or (), limits.vocab_size)
    _check_ids("embedding_bias", tuple(request.logit_bias), limits.vocab_size)


def _check_support(request: Request, limits: EngineLimits) -> None:
    sampling = request.sampling_config
    if sampling.beam_width > limits.max_beam_width:
        raise UnsupportedRequestError(
            "beam_width",
            f"{sampling.beam_width} asked for, this engine was built with "
            f"max_beam_width={limits.max_beam_width}",
        )
    if sampling.num_return_sequences > 1:
        raise UnsupportedRequestError(
            "num_return_sequences",
            f"{sampling.num_return_sequences} asked for, this engine returns 1 sequence a request",
        )


def _check_lengths(request: Request, limits: EngineLimits) -> None:
    prompt, total = len(request.input_token_ids), len(request.input_token_ids) + request.max_tokens
    if prompt >= limits.max_seq_len:
        raise InvalidRequestError(
            "input_ids",
            f"{prompt} tokens",
            f"leave no room to generate: max_seq_len is {limits.max_seq_len}",
        )
    if total > limits.max_seq_len:
        raise InvalidRequestError(
            "max_tokens",
            request.max_tokens,
            f"is too large: {prompt} prompt tokens + max_tokens must not exceed max_seq_len = "
            f"{limits.max_seq_len}",
        )
    if not limits.enable_chunked_context:
        _check_unchunked(prompt, total, limits)
    _check_capacity(request, total, limits)


def _check_capacity(request: Request, total: int, limits: EngineLimits) -> None:
    """A request that nobody else holds blocks beside must be able to run to its end."""
    size = limits.tokens_per_block
    for pool in limits.pools:
        needed = most_blocks(total, pool.window, chunk=limits.max_num_tokens, tokens_per_block=size)
        if needed > pool.num_blocks:
            raise InvalidRequestError(
                "max_tokens",
                request.max_tokens,
                f"is too large: {total - request.max_tokens} prompt tokens + max_tokens exceed the "
                f"whole KV cache (max_tokens_in_paged_kv_cache = {pool.num_blocks * size})",
            )


def _check_unchunked(prompt: int, total: int, limits: EngineLimits) -> None:
    if prompt > limits.max_num_tokens:
        raise InvalidRequestError(
            "input_ids",
            f"{prompt} tokens",
            f"are too many: without enable_chunked_context a prompt must fit max_num_tokens = "
            f"{limits.max_num_tokens}",
        )
    if limits.may_pause and total > limits.max_num_tokens:
        raise InvalidRequestError(
            "max_tokens",
            total - prompt,
            "is too large: a paused request is replayed as one context, and without "
            f"enable_chunked_context {total} tokens must fit max_num_tokens = "
            f"{limits.max_num_tokens}",
        )


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequestError(
            name, low if low < 0 else high, f"must be between 0 and {vocab_size - 1}"
        )
