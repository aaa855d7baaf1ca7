"""The inputs that are served. Ranges are enforced by api/request.py, tensors.py and the engine."""

from __future__ import annotations

from inflight.tritonserver.contract.retention import RETENTION
from inflight.tritonserver.contract.sampling import SAMPLING
from inflight.tritonserver.contract.types import Dtype, InputField

_PROMPT = (
    InputField(
        field="text_input",
        dtype=Dtype.STRING,
        text_names=("text_input",),
        meaning="The prompt. One of text_input, messages and input_ids is needed",
        range="1 to max_input_chars characters",
        equals="vLLM: prompt",
    ),
    InputField(
        field="messages",
        dtype=Dtype.STRING,
        text_names=("messages",),
        meaning="A chat as JSON, [{role, content}, ...]; the checkpoint's chat template makes the "
        "prompt of it",
        range="at most max_input_chars characters",
        equals="OpenAI: messages",
    ),
    InputField(
        field="input_ids",
        dtype=Dtype.INT32,
        dims=(-1,),
        ids_names=("input_ids",),
        parameter_names=("input_token_ids",),
        meaning="The prompt as token ids, right-padded to the longest of the batch",
        range="each in [0, vocabulary size)",
        equals="Executor: inputTokenIds",
    ),
    InputField(
        field="input_lengths",
        dtype=Dtype.INT32,
        ids_names=("input_lengths",),
        meaning="Tokens of input_ids that count",
        range="1 to the width of input_ids",
        default="the width of input_ids",
    ),
    InputField(
        field="cache_salt",
        dtype=Dtype.STRING,
        text_names=("cache_salt",),
        parameter_names=("cache_salt_id",),
        meaning="Prompts share KV cache blocks only with prompts of the same salt",
        range="at most 256 characters",
        equals="Executor: cacheSaltID; vLLM: cache_salt",
    ),
)

_LENGTH = (
    InputField(
        field="max_tokens",
        dtype=Dtype.INT32,
        text_names=("max_tokens",),
        ids_names=("request_output_len",),
        parameter_names=("max_completion_tokens", "max_new_tokens"),
        meaning="Tokens to generate at most",
        range="1 or larger; prompt + max_tokens at most max_seq_len",
        default="default_max_tokens, or what max_seq_len leaves",
    ),
    InputField(
        field="min_tokens",
        dtype=Dtype.INT32,
        text_names=("min_tokens", "min_length"),
        meaning="End ids cannot be chosen before this many tokens",
        range="0 or larger",
        default="0",
    ),
    InputField(
        field="end_id",
        dtype=Dtype.INT32,
        text_names=("end_id",),
        meaning="Token id that ends the answer, in place of the checkpoint's; -1: none",
        range="-1 to vocabulary size - 1",
        default="the checkpoint's end ids",
        equals="vLLM: ignore_eos (as -1)",
    ),
    InputField(
        field="pad_id",
        dtype=Dtype.INT32,
        text_names=("pad_id",),
        meaning="Accepted from clients that send it with end_id; nothing here is padded",
    ),
    InputField(
        field="stop_words",
        dtype=Dtype.STRING,
        dims=(-1,),
        text_names=("stop_words",),
        meaning='Texts that end the answer and are not part of it; matched on text. "" is no word',
        range="at most 64 words of at most 1024 characters",
        equals="vLLM: stop (inside sampling_parameters)",
    ),
    InputField(
        field="stop_words_list",
        dtype=Dtype.INT32,
        dims=(2, -1),
        ids_names=("stop_words_list",),
        meaning="Stop words as token ids: row 0 all ids one after the other, row 1 the end of each "
        "word in row 0, padded with -1",
        range="at most 64 words",
        equals="vLLM: stop_token_ids",
    ),
)

_SERVICE = (
    InputField(
        field="priority",
        dtype=Dtype.FP32,
        text_names=("priority",),
        meaning="Higher goes first; waiting raises it",
        range="0 to 1",
        default="0.5",
        equals="Executor: priority",
    ),
    InputField(
        field="timeout_us",
        dtype=Dtype.UINT64,
        text_names=("timeout_us",),
        parameter_names=("timeout",),
        meaning="Microseconds after which the answer ends as it is (timed_out); the shortest of "
        "this, gRPC's timeout and allotted_time_ms counts",
        range="1 or larger",
        default="none",
    ),
    InputField(
        field="allotted_time_ms",
        dtype=Dtype.FP32,
        parameter_names=("allotted_time_ms",),
        meaning="timeout_us in milliseconds",
        range="larger than 0",
        default="none",
        equals="Executor: allottedTimeMs",
    ),
    InputField(
        field="stream",
        dtype=Dtype.BOOL,
        text_names=("stream",),
        ids_names=("streaming",),
        meaning="Deltas as they are generated; false: one response",
        default="false",
    ),
    InputField(
        field="stop",
        dtype=Dtype.BOOL,
        text_names=("stop",),
        meaning="true: this request cancels the running request of the same id",
        default="false",
    ),
)

_OUTPUTS_WANTED = (
    InputField(
        field="exclude_input_in_output",
        dtype=Dtype.BOOL,
        text_names=("exclude_input_in_output",),
        parameter_names=("exclude_input_from_output",),
        meaning="false: the answer starts with the prompt",
        default="exclude_input_in_output of the configuration: true",
        equals="OpenAI: not echo",
    ),
    InputField(
        field="return_log_probs",
        dtype=Dtype.BOOL,
        text_names=("return_log_probs",),
        meaning="Fill cum_log_probs and output_log_probs",
        default="false",
    ),
    InputField(
        field="return_perf_metrics",
        dtype=Dtype.BOOL,
        text_names=("return_perf_metrics",),
        parameter_names=("return_kv_cache_reuse_stats",),
        meaning="Fill the kv_cache_* and *_time_ns outputs of the last response",
        default="false",
    ),
    InputField(
        field="return_num_input_tokens",
        dtype=Dtype.BOOL,
        text_names=("return_num_input_tokens",),
        meaning="Fill num_input_tokens",
        default="false",
    ),
    InputField(
        field="return_num_output_tokens",
        dtype=Dtype.BOOL,
        text_names=("return_num_output_tokens",),
        meaning="Fill num_output_tokens",
        default="false",
    ),
)

SERVED: tuple[InputField, ...] = (
    _PROMPT + _LENGTH + SAMPLING + _SERVICE + RETENTION + _OUTPUTS_WANTED
)
