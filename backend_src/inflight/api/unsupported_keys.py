"""Configuration keys of TensorRT-LLM's backend that Inflight refuses, and why."""

from __future__ import annotations

from collections.abc import Mapping

UNSUPPORTED_KEYS: Mapping[str, str] = {
    "gpt_model_path": "Inflight serves a Hugging Face checkpoint: set model_dir",
    "engine_dir": "Inflight serves a Hugging Face checkpoint: set model_dir",
    "tokenizer_dir": "the tokenizer comes from the checkpoint: set model_dir",
    "encoder_model_path": "encoder-decoder models are not served",
    "gpt_model_type": "batching is always in-flight; set batch_scheduler_policy to static_batch "
    "for the static baseline",
    "batching_strategy": "batching is always in-flight; set batch_scheduler_policy",
    "max_attention_window_size": "the attention window comes from the checkpoint",
    "sink_token_length": "attention sinks come from the checkpoint",
    "cross_kv_cache_fraction": "encoder-decoder models are not served",
    "enable_trt_overlap": "there is no such switch",
    "recv_poll_period_ms": "the engine waits for requests, it does not poll",
    "decoding_mode": "it follows from each request (greedy or sampling)",
    "gpu_device_ids": "one device is served",
    "participant_ids": "one process is served",
    "num_nodes": "one node is served",
    "executor_worker_path": "there is no separate worker binary",
    "gpu_weights_percent": "weight streaming is not served",
    "medusa_choices": "speculative decoding is not served",
    "eagle_choices": "speculative decoding is not served",
    "lookahead_window_size": "speculative decoding is not served",
    "lookahead_ngram_size": "speculative decoding is not served",
    "lookahead_verification_set_size": "speculative decoding is not served",
    "speculative_decoding_fast_logits": "speculative decoding is not served",
    "guided_decoding_backend": "guided decoding is not served",
    "xgrammar_tokenizer_info_path": "guided decoding is not served",
    "lora_cache_optimal_adapter_size": "LoRA is not served",
    "lora_cache_max_adapter_size": "LoRA is not served",
    "lora_cache_gpu_memory_fraction": "LoRA is not served",
    "lora_cache_host_memory_bytes": "LoRA is not served",
    "lora_prefetch_dir": "LoRA is not served",
    "enable_context_fmha_fp32_acc": "attention always accumulates in fp32",
    "multi_block_mode": "there is no such switch",
}
"""Keys of TensorRT-LLM's backend that are refused, with the reason."""
