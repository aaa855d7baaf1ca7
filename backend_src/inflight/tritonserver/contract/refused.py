"""The inputs that TensorRT-LLM has and this engine does not serve, each with the reason.

They are declared like any other, so that a client reads our reason and not the server's
"unexpected input". Values that ask for nothing (``neutral``) are accepted.
"""

from __future__ import annotations

from inflight.tritonserver.contract.types import Dtype, InputField, Refusal, Scalar

_ONE_BEAM = "this engine was built with max_beam_width=1"
_ONE_SEQUENCE = "one sequence is returned for each prompt; send a batch of equal prompts"
_NO_ENCODER = "encoder-decoder models are not served"
_NO_LORA = "LoRA is not served"
_NO_SPECULATION = "speculative decoding is not served"
_NO_GUIDE = "guided decoding is not served"
_NO_PROMPT_TABLE = "prompt tuning is not served"
_NO_MEDIA = "multimodal prompts are not served"
_NO_LOGITS = "logits are not returned; return_log_probs gives log-probs of the chosen tokens"
_NO_PHASES = "context and generation run in one engine; they are not served apart"
_FIXED_TOP_P = "top_p stays the same for the whole answer"
_NO_LOGITS_PROCESSOR = "logits post-processors are not served"
_FIELDS_APART = "send its fields under their own names"
_DELTAS = "a stream carries only what is new"

_DOORS = ("text", "ids", "parameter")


def _refused(
    names: str,
    dtype: Dtype,
    reason: str,
    *,
    dims: tuple[int, ...] = (1,),
    neutral: tuple[Scalar, ...] = (),
    least: int | None = None,
    door: str = "text",
) -> InputField:
    """``names``: the field, then further names for it that may arrive as parameters.

    ``door``: "text" (declared by the ensembles and inflight_llm), "ids" (by inflight_llm alone),
    "parameter" (an input of no model).
    """
    assert door in _DOORS
    field, *others = names.split()
    return InputField(
        field=field,
        dtype=dtype,
        dims=dims,
        text_names=(field,) if door == "text" else (),
        ids_names=(field,) if door == "ids" else (),
        parameter_names=(field, *others) if door == "parameter" else tuple(others),
        meaning="",
        refusal=Refusal(reason=reason, neutral=neutral, least=least),
    )


_B, _I, _L, _U, _F, _H, _S = (
    Dtype.BOOL,
    Dtype.INT32,
    Dtype.INT64,
    Dtype.UINT64,
    Dtype.FP32,
    Dtype.FP16,
    Dtype.STRING,
)
_LIST, _MATRIX = (-1,), (-1, -1)

_BEAMS = (
    _refused("beam_width", _I, _ONE_BEAM, neutral=(1,), least=1),
    _refused("num_return_sequences n best_of", _I, _ONE_SEQUENCE, neutral=(1,), least=1),
    InputField(
        field="length_penalty",
        dtype=Dtype.FP32,
        text_names=("length_penalty",),
        ids_names=("len_penalty",),
        meaning="",
        refusal=Refusal(reason=_ONE_BEAM, neutral=(0.0, 1.0)),
    ),
    _refused("early_stopping", _B, _ONE_BEAM, neutral=(False,)),
    _refused("beam_search_diversity_rate beam_search_diversity", _F, _ONE_BEAM, neutral=(0.0,)),
    _refused("beam_width_array", _I, _ONE_BEAM, dims=_LIST, door="parameter"),
    _refused("use_beam_search", _B, _ONE_BEAM, neutral=(False,), door="parameter"),
)

_SAMPLING = (
    _refused("runtime_top_p_min top_p_min", _F, _FIXED_TOP_P, neutral=(0.0, 1e-6)),
    _refused("runtime_top_p_decay top_p_decay", _F, _FIXED_TOP_P, neutral=(1.0,)),
    _refused("runtime_top_p_reset_ids top_p_reset_ids", _I, _FIXED_TOP_P, neutral=(-1,)),
    _refused(
        "no_repeat_ngram_size",
        _I,
        "repeated n-grams are not banned; repetition_penalty is served",
        neutral=(0, 2**30),
    ),
    _refused(
        "logits_post_processor_name logits_post_processor",
        _S,
        _NO_LOGITS_PROCESSOR,
        neutral=("",),
        door="parameter",
    ),
)

_LOGITS = (
    _refused("return_context_logits", _B, _NO_LOGITS, neutral=(False,)),
    _refused("return_generation_logits", _B, _NO_LOGITS, neutral=(False,)),
    _refused("return_encoder_output", _B, _NO_ENCODER, neutral=(False,), door="parameter"),
    _refused("return_all_generated_tokens", _B, _DELTAS, neutral=(False,), door="parameter"),
    _refused("additional_model_outputs", _S, _NO_LOGITS, neutral=("",), door="parameter"),
)

_OTHER_MODELS = (
    _refused("decoder_text_input", _S, _NO_ENCODER, neutral=("",)),
    _refused("decoder_input_ids", _I, _NO_ENCODER, dims=_LIST, door="ids"),
    _refused("decoder_input_lengths", _I, _NO_ENCODER, door="ids"),
    _refused("encoder_input_features", _H, _NO_ENCODER, dims=_MATRIX, door="ids"),
    _refused("encoder_output_lengths encoder_output_length", _I, _NO_ENCODER, door="ids"),
    _refused("encoder_input_token_ids", _I, _NO_ENCODER, dims=_LIST, door="parameter"),
    _refused("cross_attention_mask", _B, _NO_ENCODER, dims=_MATRIX, door="ids"),
    _refused("skip_cross_attn_blocks", _B, _NO_ENCODER, neutral=(False,), door="ids"),
    _refused("mrope_rotary_cos_sin", _F, _NO_MEDIA, dims=_LIST, door="ids"),
    _refused("mrope_position_deltas", _L, _NO_MEDIA, door="ids"),
    _refused("m_rope_config mrope_config", _S, _NO_MEDIA, door="parameter"),
    _refused("multimodal_input", _S, _NO_MEDIA, door="parameter"),
    _refused("multimodal_embedding", _S, _NO_MEDIA, door="parameter"),
    _refused("position_ids", _I, "positions follow from the prompt", dims=_LIST, door="parameter"),
)

_ADAPTERS = (
    _refused("prompt_embedding_table", _H, _NO_PROMPT_TABLE, dims=_MATRIX),
    _refused("prompt_table_extra_id", _U, _NO_PROMPT_TABLE),
    _refused("prompt_table_extra_ids", _U, _NO_PROMPT_TABLE, dims=_LIST, door="ids"),
    _refused("prompt_vocab_size", _I, _NO_PROMPT_TABLE, neutral=(0,)),
    _refused("p_tuning_config prompt_tuning_config", _S, _NO_PROMPT_TABLE, door="parameter"),
    _refused("lora_task_id", _U, _NO_LORA),
    _refused("lora_weights", _H, _NO_LORA, dims=_MATRIX),
    InputField(
        field="lora_config",
        dtype=Dtype.INT32,
        dims=(-1, 3),
        text_names=("lora_config",),
        meaning="",
        refusal=Refusal(reason=_NO_LORA),
    ),
    _refused("lora_name", _S, _NO_LORA, neutral=("",), door="parameter"),
    _refused("language_adapter_uid", _I, _NO_LORA, door="parameter"),
)

_SPECULATION = (
    _refused("draft_input_ids", _I, _NO_SPECULATION, dims=_LIST, door="ids"),
    _refused("draft_logits", _F, _NO_SPECULATION, dims=_MATRIX, door="ids"),
    _refused("draft_acceptance_threshold", _F, _NO_SPECULATION),
    _refused("lookahead_window_size", _I, _NO_SPECULATION),
    _refused("lookahead_ngram_size", _I, _NO_SPECULATION),
    _refused("lookahead_verification_set_size", _I, _NO_SPECULATION),
    _refused("external_draft_tokens_config", _S, _NO_SPECULATION, door="parameter"),
    _refused("lookahead_config", _S, _NO_SPECULATION, door="parameter"),
    _refused("eagle_config", _S, _NO_SPECULATION, door="parameter"),
)

_GUIDE = (
    _refused("guided_decoding_guide_type", _S, _NO_GUIDE, neutral=("",)),
    _refused("guided_decoding_guide", _S, _NO_GUIDE, neutral=("",)),
    _refused("guided_decoding_params guided_decoding", _S, _NO_GUIDE, door="parameter"),
)

_SERVICE = (
    _refused("context_phase_params", Dtype.UINT8, _NO_PHASES, dims=_LIST, door="ids"),
    _refused(
        "request_type type",
        _S,
        _NO_PHASES,
        neutral=("", "context_and_generation", "CONTEXT_AND_GENERATION"),
        door="parameter",
    ),
    _refused(
        "client_id", _S, "the request id is the client's own id", neutral=("",), door="parameter"
    ),
    _refused("sampling_config", _S, _FIELDS_APART, door="parameter"),
    _refused("output_config", _S, _FIELDS_APART, door="parameter"),
    _refused(
        "kv_cache_retention_config",
        _S,
        "send its fields as the retention_* inputs",
        door="parameter",
    ),
)

REFUSED: tuple[InputField, ...] = (
    _BEAMS + _SAMPLING + _LOGITS + _OTHER_MODELS + _ADAPTERS + _SPECULATION + _GUIDE + _SERVICE
)
