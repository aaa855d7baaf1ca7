"""Perplexity and deviation by hand arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inflight.model.accuracy import deviation, negative_log_likelihoods


def test_each_token_after_the_first_counts_by_its_share() -> None:
    logits = np.log(np.array([[1, 2, 1], [1, 1, 8], [5, 5, 5]], dtype=np.float32))
    found = negative_log_likelihoods(logits, [0, 1, 2])
    assert found == pytest.approx([-math.log(2 / 4), -math.log(8 / 10)])


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, 1e4 - 1], [0, 0]], dtype=np.float32)
    (found,) = negative_log_likelihoods(logits, [0, 1])
    assert found == pytest.approx(math.log(1 + math.exp(-1)) + 1)


def test_deviation_is_relative_to_the_spread() -> None:
    reference = np.array([[0, 4], [4, 0]], dtype=np.float32)
    off = reference + np.array([[0, 0], [0, 5]], dtype=np.float32)
    found = deviation(off, reference)
    assert found.error == pytest.approx(2.5 / 2)
    assert found.agreement == 0.5
    assert deviation(reference, reference).error == 0
