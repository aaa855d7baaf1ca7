"""The keys of ``sampling_parameters``: vLLM's names that differ from ours, or that we refuse.

Every other key is looked up as a request parameter of its own name. A key that says nothing about
sampling is refused, unlike an unknown request parameter: vLLM refuses it as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from inflight.tritonserver.contract.types import Refusal


class Renamed(NamedTuple):
    """A served key; ``field`` is where its value lands among the fields of a request."""

    field: str
    meaning: str


RENAMED: Mapping[str, Renamed] = {
    "stop": Renamed("stop_words", "stop_words; one string or a list"),
    "stop_token_ids": Renamed(
        "stop_token_ids",
        "token ids that end the answer and are not part of it, also before min_tokens; a list",
    ),
    "ignore_eos": Renamed("end_id", "true: end_id -1"),
    "logit_bias": Renamed(
        "logit_bias", "added to the logits; an object of token ids and biases, at most 1024"
    ),
    "top_k": Renamed("top_k", "top_k; -1 is unset"),
}

FIELDS = frozenset(
    {
        "max_tokens",
        "min_tokens",
        "end_id",
        "stop_words",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
        "logit_bias",
    }
)
"""The fields that a key may state."""

_NO_TOP_LOG_PROBS = "return_log_probs gives the log-probs of the chosen tokens; others are not kept"
_NO_SPECIAL_TOKENS = "special tokens are never part of the text"
_NO_GUIDE = "guided decoding is not served"

REFUSED: Mapping[str, Refusal] = {
    "logprobs": Refusal(reason=_NO_TOP_LOG_PROBS, neutral=(0,)),
    "prompt_logprobs": Refusal(reason=_NO_TOP_LOG_PROBS, neutral=(0,)),
    "include_stop_str_in_output": Refusal(
        reason="stop words are never part of the answer", neutral=(False,)
    ),
    "skip_special_tokens": Refusal(reason=_NO_SPECIAL_TOKENS, neutral=(True,)),
    "spaces_between_special_tokens": Refusal(reason=_NO_SPECIAL_TOKENS, neutral=(True,)),
    "detokenize": Refusal(reason="text is always returned", neutral=(True,)),
    "truncate_prompt_tokens": Refusal(reason="prompts are not cut"),
    "logits_processors": Refusal(reason="logits post-processors are not served"),
    "structured_outputs": Refusal(reason=_NO_GUIDE),
    "output_kind": Refusal(reason="the stream input chooses between deltas and one response"),
}
"""null always counts as unset."""
