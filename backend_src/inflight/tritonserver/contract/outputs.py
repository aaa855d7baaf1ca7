"""The outputs of ``inflight_llm``, text_output first: some clients read the first output.

What TensorRT-LLM returns and this engine does not is declared by no model, so the server refuses a
request for it by name; ``UNSERVED`` says why, for the documentation.
"""

from __future__ import annotations

from inflight.tritonserver.contract.types import Dtype, OutputField

_ASKED_PERF = "last response, with return_perf_metrics"

TEXT_OUTPUT = OutputField(
    name="text_output",
    dtype=Dtype.STRING,
    meaning="New text since the response before; the whole text when not streaming",
    sent_when="text door and ensembles: always",
)

SERVED: tuple[OutputField, ...] = (
    TEXT_OUTPUT,
    OutputField(
        name="finish_reason",
        dtype=Dtype.STRING,
        meaning='"stop", "length", "timed_out" or "cancelled" on the last response, else ""',
    ),
    OutputField(
        name="stop_reason",
        dtype=Dtype.STRING,
        meaning="The stop word that matched or the end id as a number; else empty",
    ),
    OutputField(
        name="num_input_tokens",
        dtype=Dtype.INT32,
        meaning="Tokens of the prompt; the same on each response",
        sent_when="with return_num_input_tokens",
    ),
    OutputField(
        name="num_output_tokens",
        dtype=Dtype.INT32,
        meaning="Tokens generated in this response, end ids not counted; 0 on the empty last one",
        sent_when="with return_num_output_tokens",
    ),
    OutputField(
        name="output_ids",
        dtype=Dtype.INT32,
        dims=(-1, -1),
        on_ensemble=False,
        meaning="New token ids, [1, beams, tokens] with 1 beam",
        sent_when="ids door: always",
        equals="Executor: outputTokenIds",
    ),
    OutputField(
        name="sequence_length",
        dtype=Dtype.INT32,
        dims=(-1,),
        on_ensemble=False,
        meaning="Tokens of output_ids that count, for each beam",
        sent_when="ids door: always",
    ),
    OutputField(
        name="prefix_token_ids",
        dtype=Dtype.INT32,
        dims=(-1,),
        on_ensemble=False,
        meaning="The ids a detokenizer puts before output_ids; their own text is not to be sent",
        sent_when="ids door: always",
    ),
    OutputField(
        name="text_length",
        dtype=Dtype.INT32,
        on_ensemble=False,
        meaning="Characters to send of decode(prefix_token_ids + output_ids) after "
        "decode(prefix_token_ids)",
        sent_when="ids door: always",
    ),
    OutputField(
        name="cum_log_probs",
        dtype=Dtype.FP32,
        dims=(-1,),
        meaning="Sum of the log-probs of the output so far, for each beam",
        sent_when="with return_log_probs",
    ),
    OutputField(
        name="output_log_probs",
        dtype=Dtype.FP32,
        dims=(-1, -1),
        meaning="Log-prob of each new token, [1, beams, tokens]",
        sent_when="with return_log_probs",
        equals="Executor: logProbs",
    ),
    OutputField(
        name="batch_index",
        dtype=Dtype.INT32,
        meaning="Place in the batch of the prompt that this response belongs to",
    ),
    OutputField(
        name="sequence_index",
        dtype=Dtype.INT32,
        meaning="0: one sequence is returned for each prompt",
    ),
    OutputField(
        name="kv_cache_alloc_new_blocks",
        dtype=Dtype.INT32,
        meaning="KV cache blocks that had to be filled",
        sent_when=_ASKED_PERF,
    ),
    OutputField(
        name="kv_cache_reused_blocks",
        dtype=Dtype.INT32,
        meaning="KV cache blocks found filled with the same prefix",
        sent_when=_ASKED_PERF,
    ),
    OutputField(
        name="kv_cache_alloc_total_blocks",
        dtype=Dtype.INT32,
        meaning="KV cache blocks taken in all",
        sent_when=_ASKED_PERF,
    ),
    OutputField(
        name="arrival_time_ns",
        dtype=Dtype.INT64,
        meaning="Nanoseconds of the server's monotonic clock",
        sent_when=_ASKED_PERF,
    ),
    OutputField(
        name="first_scheduled_time_ns",
        dtype=Dtype.INT64,
        meaning="Same clock; 0: never",
        sent_when=_ASKED_PERF,
    ),
    OutputField(
        name="first_token_time_ns",
        dtype=Dtype.INT64,
        meaning="Same clock; 0: never",
        sent_when=_ASKED_PERF,
    ),
    OutputField(
        name="last_token_time_ns",
        dtype=Dtype.INT64,
        meaning="Same clock; 0: never",
        sent_when=_ASKED_PERF,
    ),
)

UNSERVED: tuple[tuple[str, str], ...] = (
    ("context_logits", "logits are not returned"),
    ("generation_logits", "logits are not returned"),
    ("context_phase_params", "context and generation are not served apart"),
    ("acceptance_rate", "speculative decoding is not served"),
    ("total_accepted_draft_tokens", "speculative decoding is not served"),
    ("total_draft_tokens", "speculative decoding is not served"),
)
