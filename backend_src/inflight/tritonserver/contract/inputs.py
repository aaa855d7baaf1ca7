"""The inputs that are served. Ranges are enforced by api/request.py, tensors.py and the engine."""

from __future__ import annotations

from inflight.tritonserver.contract.retention import RETENTION
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

_SAMPLING = (
    InputField(
        field="temperature",
        dtype=Dtype.FP32,
        text_names=("temperature",),
        meaning="Divides the logits; 0: greedy",
        range="0 or larger",
        default="greedy where no sampling field is sent, else 1",
    ),
    InputField(
        field="top_k",
        dtype=Dtype.INT32,
        text_names=("top_k",),
        ids_names=("runtime_top_k",),
        meaning="Keep the k likeliest tokens; 0: unset; 1: greedy",
        range="0 or larger",
        default="unset",
    ),
    InputField(
        field="top_p",
        dtype=Dtype.FP32,
        text_names=("top_p",),
        ids_names=("runtime_top_p",),
        meaning="Keep the smallest set of tokens that reaches this probability; 0: unset",
        range="0 to 1",
        default="unset",
    ),
    InputField(
        field="min_p",
        dtype=Dtype.FP32,
        text_names=("min_p",),
        meaning="Drop tokens less likely than this share of the likeliest; 0: unset",
        range="0 to 1",
        default="unset",
        equals="Executor: minP",
    ),
    InputField(
        field="seed",
        dtype=Dtype.UINT64,
        text_names=("seed", "random_seed"),
        meaning="Makes sampling repeatable; 0 is a seed like any other",
        range="0 to 2**64-1",
        default="fresh entropy",
    ),
    InputField(
        field="repetition_penalty",
        dtype=Dtype.FP32,
        text_names=("repetition_penalty",),
        meaning="A seen token's logit is divided by it if positive, else multiplied",
        range="larger than 0",
        default="1",
    ),
    InputField(
        field="presence_penalty",
        dtype=Dtype.FP32,
        text_names=("presence_penalty",),
        meaning="Subtracted once from the logit of each seen token",
        range="finite",
        default="0",
    ),
    InputField(
        field="frequency_penalty",
        dtype=Dtype.FP32,
        text_names=("frequency_penalty",),
        meaning="Subtracted from a token's logit once for each time it was seen",
        range="finite",
        default="0",
    ),
    InputField(
        field="bad_words",
        dtype=Dtype.STRING,
        dims=(-1,),
        text_names=("bad_words",),
        meaning='Texts that are not generated, bare or after a space. "" is no word',
        range="at most 1024 token sequences",
    ),
    InputField(
        field="bad_words_list",
        dtype=Dtype.INT32,
        dims=(2, -1),
        ids_names=("bad_words_list",),
        meaning="Bad words as token ids, in the form of stop_words_list",
        range="at most 1024 words",
    ),
    InputField(
        field="embedding_bias_words",
        dtype=Dtype.STRING,
        dims=(-1,),
        text_names=("embedding_bias_words",),
        meaning="Words whose tokens get a bias, bare or after a space",
        range="as many as embedding_bias_weights, at most 1024",
    ),
    InputField(
        field="embedding_bias_weights",
        dtype=Dtype.FP32,
        dims=(-1,),
        text_names=("embedding_bias_weights",),
        meaning="Added to the logits of the tokens of each word",
        range="finite",
    ),
    InputField(
        field="embedding_bias",
        dtype=Dtype.FP32,
        dims=(-1,),
        ids_names=("embedding_bias",),
        meaning="Added to the logits, one value for each token id from 0 on",
        range="at most vocabulary size values, finite",
        equals="vLLM: logit_bias (inside sampling_parameters)",
    ),
    InputField(
        field="sampling_parameters",
        dtype=Dtype.STRING,
        text_names=("sampling_parameters",),
        meaning="vLLM's sampling parameters as a JSON object; numbers may be strings",
        range="at most 65536 characters",
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
    _PROMPT + _LENGTH + _SAMPLING + _SERVICE + RETENTION + _OUTPUTS_WANTED
)
