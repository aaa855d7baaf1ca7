"""Words of a request as token ids: stop words, bad words and biases, as text or as ids.

TensorRT-LLM sends a list of words as INT32 [2, length]: row 0 holds the ids of all words one after
the other, padded with 0; row 1 the end of each word in row 0, padded with -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.api.request import MAX_BAD_WORDS, MAX_STOP_WORD_LENGTH, MAX_STOP_WORDS
from inflight.errors import InvalidRequestError, UnsupportedRequestError
from inflight.text.tokenizer import Tokenizer

Sequences = tuple[tuple[int, ...], ...]

MAX_SPELLED_CHARS = 1 << 16
"""Characters of all bad words, and of all words with a bias. Finding how they are spelled takes the
interpreter from the engine again and again: a million characters slow all streams for seconds."""


def real_words(words: Iterable[str]) -> tuple[str, ...]:
    """``words`` without "", which clients send for no word at all, and without repetitions."""
    return tuple(dict.fromkeys(word for word in words if word))


def stop_token_sequences(fields: Mapping[str, Any]) -> Sequences:
    """Of stop_token_ids and stop_words_list; raises InvalidRequestError for a malformed list."""
    single = tuple((token_id,) for token_id in fields.get("stop_token_ids", ()))
    if "stop_words_list" not in fields:
        return single
    return single + unflatten("stop_words_list", fields["stop_words_list"], MAX_STOP_WORDS)


def bad_word_sequences(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> Sequences:
    """Of bad_words_list and every spelling of bad_words.

    Raises InvalidRequestError for a malformed list, and for too many or too long words.
    """
    sequences: Sequences = ()
    if "bad_words_list" in fields:
        sequences = unflatten("bad_words_list", fields["bad_words_list"], MAX_BAD_WORDS)
    words = _bounded("bad_words", real_words(fields.get("bad_words", ())))
    if words and tokenizer is None:
        raise UnsupportedRequestError(
            "bad_words", "the checkpoint has no tokenizer: send bad_words_list"
        )
    for word in words:
        assert tokenizer is not None
        sequences += tokenizer.word_sequences(word)
    sequences = tuple(dict.fromkeys(sequences))
    if len(sequences) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            "bad_words",
            len(sequences),
            "token sequences are too many (a word is spelled in several ways): at most "
            f"{MAX_BAD_WORDS} are allowed",
        )
    return sequences


def logit_bias(fields: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[int, float]:
    """Token id -> bias: the sum of logit_bias, embedding_bias and embedding_bias_words.

    As in TensorRT-LLM, a word's weight goes to each of its tokens (once, whatever its spellings).
    Raises InvalidRequestError unless there are as many words as weights, all of them finite.
    """
    total: dict[int, float] = dict(fields.get("logit_bias", {}))
    dense = fields.get("embedding_bias", np.zeros(0, np.float32))
    for token_id in np.flatnonzero(dense).tolist():
        total[token_id] = total.get(token_id, 0.0) + float(dense[token_id])
    words = _bounded("embedding_bias_words", fields.get("embedding_bias_words", ()))
    weights = fields.get("embedding_bias_weights", np.zeros(0, np.float32)).tolist()
    if len(words) != len(weights):
        raise InvalidRequestError(
            "embedding_bias_weights", len(weights), f"values for {len(words)} words"
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise InvalidRequestError("embedding_bias_weights", weight, "must be finite")
    if words and tokenizer is None:
        raise UnsupportedRequestError(
            "embedding_bias_words", "the checkpoint has no tokenizer: send embedding_bias"
        )
    for word, weight in zip(words, weights, strict=True):
        assert tokenizer is not None
        sequences = tokenizer.word_sequences(word) if word else ()
        for token_id in {token_id for ids in sequences for token_id in ids}:
            total[token_id] = total.get(token_id, 0.0) + weight
    return total


def flatten(sequences: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    """The flat encoding, [2, length]; [2, 0] without words."""
    ids: list[int] = []
    ends: list[int] = []
    for sequence in sequences:
        ids += sequence
        ends.append(len(ids))
    ends += [-1] * (len(ids) - len(ends))
    return np.array([ids, ends], dtype=np.int32)


def unflatten(name: str, flat: NDArray[Any], most_words: int) -> Sequences:
    """The words of a flat encoding; raises InvalidRequestError that names ``name``."""
    num_words = int(np.count_nonzero(flat[1] != -1))
    if num_words > most_words:
        raise InvalidRequestError(name, num_words, f"words: at most {most_words} are allowed")
    ids, ends = flat.tolist()
    words = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(ids):
            raise InvalidRequestError(
                name, end, f"in row 1 must be above {start} and at most {len(ids)}"
            )
        words.append(tuple(ids[start:end]))
        start = end
    if any(end != -1 for end in ends[len(words) :]):
        raise InvalidRequestError(name, "row 1", "has an end after the padding (-1)")
    return tuple(words)


def _bounded(name: str, words: Sequence[str]) -> Sequence[str]:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            name, len(words), f"words are too many: at most {MAX_BAD_WORDS} are allowed"
        )
    for word in words:
        if len(word) > MAX_STOP_WORD_LENGTH:
            raise InvalidRequestError(
                name, word, f"must have at most {MAX_STOP_WORD_LENGTH} characters"
            )
    num_chars = sum(map(len, words))
    if num_chars > MAX_SPELLED_CHARS:
        raise InvalidRequestError(
            name,
            f"{num_chars} characters",
            f"in all words are too many: at most {MAX_SPELLED_CHARS} are allowed",
        )
    return words
