"""The table itself: complete, without contradictions, and known under every name."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from inflight.errors import ConfigError
from inflight.tritonserver import contract, request_table
from inflight.tritonserver.contract import Dtype, field_of_parameter, field_of_tensor


def _names(listing: str) -> list[str]:
    return listing.split()


ENGINE_INPUTS = _names("""
input_ids input_lengths request_output_len decoder_input_ids decoder_input_lengths
encoder_input_features encoder_output_lengths end_id pad_id stop_words_list bad_words_list
beam_width temperature runtime_top_k runtime_top_p runtime_top_p_min runtime_top_p_decay
runtime_top_p_reset_ids len_penalty early_stopping repetition_penalty presence_penalty
frequency_penalty beam_search_diversity_rate min_length min_tokens random_seed seed
num_return_sequences embedding_bias return_log_probs return_context_logits
return_generation_logits return_perf_metrics exclude_input_in_output return_num_input_tokens
return_num_output_tokens streaming stop draft_input_ids draft_logits draft_acceptance_threshold
lookahead_window_size lookahead_ngram_size lookahead_verification_set_size prompt_embedding_table
prompt_table_extra_ids prompt_vocab_size cross_attention_mask skip_cross_attn_blocks
mrope_rotary_cos_sin mrope_position_deltas lora_task_id lora_weights lora_config
retention_token_range_starts retention_token_range_ends retention_token_range_priorities
retention_token_range_durations_ms retention_decode_priority retention_decode_duration_ms
context_phase_params guided_decoding_guide_type guided_decoding_guide no_repeat_ngram_size
""")

ENSEMBLE_INPUTS = _names("""
text_input max_tokens decoder_text_input num_return_sequences bad_words stop_words
exclude_input_in_output end_id pad_id top_k top_p temperature length_penalty repetition_penalty
min_length min_tokens presence_penalty frequency_penalty random_seed seed return_log_probs
return_context_logits return_generation_logits return_perf_metrics return_num_input_tokens
return_num_output_tokens beam_width stream prompt_embedding_table prompt_table_extra_id
prompt_vocab_size embedding_bias_words embedding_bias_weights lora_task_id lora_weights lora_config
guided_decoding_guide_type guided_decoding_guide
messages min_p priority cache_salt timeout_us stop sampling_parameters
""")

OUTPUTS = _names("""
text_output output_ids sequence_length cum_log_probs output_log_probs context_logits
generation_logits batch_index sequence_index context_phase_params kv_cache_alloc_new_blocks
kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns
first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens
total_draft_tokens num_input_tokens num_output_tokens finish_reason stop_reason
""")

EXECUTOR_FIELDS = _names("""
inputTokenIds maxTokens streaming samplingConfig outputConfig endId padId positionIds badWords
stopWords embeddingBias externalDraftTokensConfig pTuningConfig multimodalInput multimodalEmbedding
mRopeConfig loraConfig lookaheadConfig kvCacheRetentionConfig logitsPostProcessorName
logitsPostProcessor encoderInputTokenIds clientId returnAllGeneratedTokens priority type
contextPhaseParams encoderInputFeatures encoderOutputLength crossAttentionMask numReturnSequences
eagleConfig skipCrossAttnBlocks guidedDecodingParams languageAdapterUid allottedTimeMs cacheSaltID
beamWidth topK topP topPMin topPResetIds topPDecay seed temperature minTokens
beamSearchDiversityRate repetitionPenalty presencePenalty frequencyPenalty lengthPenalty
earlyStopping noRepeatNgramSize minP beamWidthArray randomSeed minLength returnLogProbs
returnContextLogits returnGenerationLogits excludeInputFromOutput returnEncoderOutput
returnPerfMetrics additionalModelOutputs
""")

SNAKE_CASE = _names("""
input_token_ids max_tokens sampling_config output_config end_id position_ids
external_draft_tokens_config p_tuning_config m_rope_config kv_cache_retention_config
logits_post_processor_name return_all_generated_tokens encoder_output_length
skip_cross_attn_blocks allotted_time_ms cache_salt_id top_k top_p_min top_p_reset_ids top_p_decay
beam_search_diversity_rate no_repeat_ngram_size min_p beam_width_array exclude_input_from_output
additional_model_outputs max_completion_tokens timeout request_type
""")


@pytest.mark.parametrize("name", sorted({*ENGINE_INPUTS, *ENSEMBLE_INPUTS}))
def test_every_input_of_the_anchor_is_an_input_here(name: str) -> None:
    assert field_of_tensor(name) is not None


@pytest.mark.parametrize(
    "name", sorted({*ENGINE_INPUTS, *ENSEMBLE_INPUTS, *EXECUTOR_FIELDS, *SNAKE_CASE})
)
def test_every_name_counts_as_a_request_parameter(name: str) -> None:
    assert field_of_parameter(name) is not None


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_output_of_the_anchor_is_served_or_explained(name: str) -> None:
    served = {output.name for output in contract.OUTPUTS}
    assert (name in served) != (name in dict(contract.UNSERVED))


def test_a_name_has_one_meaning() -> None:
    names = Counter(
        name for entry in contract.INPUTS for name in {*entry.tensor_names, *entry.parameter_names}
    )
    assert [name for name, count in names.items() if count > 1] == []
    fields = Counter(entry.field for entry in contract.INPUTS)
    assert [field for field, count in fields.items() if count > 1] == []


def test_every_entry_says_what_it_is() -> None:
    for entry in contract.INPUTS:
        said = entry.meaning if entry.refusal is None else entry.refusal.reason
        assert said, entry.field


def test_unknown_names_are_unknown() -> None:
    for name in ("id", "foo", "topk", "triton_enable_empty_final_response", ""):
        assert field_of_parameter(name) is None
    assert field_of_tensor("topK") is None


def test_aliases_are_one_field() -> None:
    for names in (
        ("seed", "random_seed", "randomSeed"),
        ("min_tokens", "min_length", "minLength"),
        ("max_tokens", "request_output_len", "max_completion_tokens", "maxTokens"),
        ("top_k", "runtime_top_k", "topK"),
        ("top_p", "runtime_top_p", "topP"),
        ("length_penalty", "len_penalty", "lengthPenalty"),
        ("stream", "streaming"),
        ("exclude_input_in_output", "exclude_input_from_output", "excludeInputFromOutput"),
        ("timeout_us", "timeout"),
    ):
        found = {entry.field for name in names if (entry := field_of_parameter(name))}
        assert found == {names[0]}


def test_text_output_is_the_first_output() -> None:
    assert contract.OUTPUTS[0].name == "text_output"


def test_arrays_have_the_declared_rank_behind_the_batch_axis() -> None:
    for output in contract.OUTPUTS:
        rank = 1 if output.dtype is Dtype.STRING else 1 + len(output.dims)
        assert output.dummy().shape == (1,) * rank
        assert output.dummy().dtype == output.dtype.numpy
    by_name = contract.OUTPUT_BY_NAME
    assert by_name["text_output"].array("né").tolist() == ["né".encode()]
    np.testing.assert_array_equal(by_name["output_ids"].array((5, 6, 7)), [[[5, 6, 7]]])
    assert by_name["output_ids"].array(()).shape == (1, 1, 0)
    assert by_name["num_output_tokens"].array(3).tolist() == [[3]]


def test_the_page_is_current(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs" / "requests.md").read_text(encoding="utf-8")
    assert request_table.updated(page) == page, (
        "run python -m inflight.tritonserver.request_table docs/requests.md"
    )


def test_the_page_names_every_input_and_output() -> None:
    tables = request_table.render()
    names = [name for e in contract.INPUTS for name in (*e.tensor_names, *e.parameter_names)]
    names += [output.name for output in contract.OUTPUTS]
    assert [name for name in names if f"`{name}`" not in tables] == []


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs the lines"):
        request_table.updated("# A page")
