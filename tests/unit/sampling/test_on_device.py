"""What a device is told of rows that sample: numbers, lists, slots, and which rows are left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.batch import LlmRequest
from inflight.batch.device_sampling import RowLists, SampledRows, SamplingInputs, SamplingRoom
from inflight.sampling import Sampler
from inflight.sampling.draw import CounterGenerator
from inflight.sampling.slots import SequenceSlots
from tests.unit.sampling.reference import generate, make_request

VOCABULARY = 97
ROOM = SamplingRoom(num_slots=4, num_listed=12)


def sampler_for(*requests: LlmRequest, room: SamplingRoom = ROOM) -> Sampler:
    sampler = Sampler(vocab_size=VOCABULARY, normalize_log_probs=False, device_room=room)
    for request in requests:
        sampler.add(request)
    return sampler


def inputs_of(sampler: Sampler, *requests: LlmRequest) -> SamplingInputs:
    inputs = sampler.rows(requests).inputs
    assert inputs is not None
    return inputs


def list_of(lists: RowLists, row: int) -> list[int]:
    return lists.ids[lists.starts[row] : lists.starts[row + 1]].tolist()


def test_rules_become_numbers_and_unset_ones_are_neutral() -> None:
    requests = [
        make_request(0, temperature=0.5, min_p=0.25, seed=3),
        make_request(1, top_k=7, top_p=0.8, log_probs=True, seed=2**64 - 1),
        make_request(2, temperature=0.0, repetition_penalty=1.5),
        make_request(3, temperature=1e-40, top_k=500, frequency_penalty=-0.5),
    ]
    inputs = inputs_of(sampler_for(*requests), *requests)
    assert inputs.temperatures.tolist() == [0.5, 1.0, 0.0, np.float32(1e-30)]
    assert inputs.top_ks.tolist() == [VOCABULARY, 7, VOCABULARY, VOCABULARY]
    assert inputs.top_ps.tolist() == [1.0, 0.8, 1.0, 1.0]
    assert inputs.min_p_offsets.tolist() == [0.5 * math.log(0.25)] + 3 * [-math.inf]
    assert inputs.repetition_penalties.tolist() == [1, 1, 1.5, 1]
    assert inputs.frequency_penalties.tolist() == [0, 0, 0, -0.5]
    assert inputs.wants_log_prob.tolist() == [0, 1, 0, 0]
    assert inputs.has_penalties and inputs.is_left.tolist() == [0, 0, 0, 0]
    draw = CounterGenerator().uniform
    expected = [draw(3, 0, 3), draw(2**64 - 1, 0, 3), 0.0, draw(0, 0, 3)]
    assert inputs.uniforms.tolist() == expected


def test_only_rows_that_need_logits_are_told_of() -> None:
    plain, drawn = make_request(0), make_request(1, temperature=1.0)
    sampler = sampler_for(plain, drawn)
    assert sampler.rows([plain]).inputs is None
    assert len(inputs_of(sampler, plain, drawn).slots) == 2
    on_host = Sampler(vocab_size=VOCABULARY, normalize_log_probs=False)
    on_host.add(drawn)
    assert on_host.rows([drawn]).inputs is None


def test_ids_are_counted_once_and_anew_in_another_slot() -> None:
    request = make_request(0, prompt=(5, 6, 5), presence_penalty=1.0)
    others = [make_request(i, temperature=1.0) for i in range(1, 9)]
    sampler = sampler_for(request, *others)
    first = inputs_of(sampler, request)
    assert list_of(first.counted, 0) == [5, 6, 5]
    assert first.fresh_slots.tolist() == first.slots.tolist()
    generate(request, 9)
    second = inputs_of(sampler, *others[:3], request)
    assert second.slots[3] == first.slots[0]
    assert list_of(second.counted, 3) == [9] and not len(second.fresh_slots)
    # It does not run, and others take all slots.
    inputs_of(sampler, *others[:4])
    third = inputs_of(sampler, others[7], request)
    assert list_of(third.counted, 1) == [5, 6, 5, 9]
    assert third.fresh_slots.tolist() == [third.slots[1]]


def test_a_slot_whose_request_has_ended_is_forgotten_first() -> None:
    first, second = (make_request(i, prompt=(i, 8), frequency_penalty=0.1) for i in range(2))
    sampler = sampler_for(first, second, room=SamplingRoom(num_slots=1, num_listed=9))
    inputs_of(sampler, first)
    sampler.remove(first.request_id)
    inputs = inputs_of(sampler, second)
    assert inputs.fresh_slots.tolist() == [0] and list_of(inputs.counted, 0) == [1, 8]


def test_biases_and_masks_are_listed_by_row_without_repeating_an_id() -> None:
    requests = [
        make_request(0, temperature=1.0),
        make_request(
            1, prompt=(3, 4), logit_bias={9: 1e35, 2: -1.5}, bad_words=((4, 7), (7,), (8, 1))
        ),
        make_request(2, min_tokens=1, end_ids=(6, 6, 95), bad_words=((6,),)),
    ]
    inputs = inputs_of(sampler_for(*requests), *requests)
    assert [list_of(inputs.biased, row) for row in range(3)] == [[], [9, 2], []]
    assert inputs.biases.tolist() == [np.float32(1e30), -1.5]
    assert [list_of(inputs.masked, row) for row in range(3)] == [[], [7], [6, 95]]
    generate(requests[2], 3)
    assert list_of(inputs_of(sampler_for(requests[2]), requests[2]).masked, 0) == [6]


def test_a_row_without_room_is_left_whole_and_comes_back() -> None:
    long = make_request(0, prompt=tuple(range(11)), presence_penalty=1.0)
    wide = make_request(1, prompt=(1,), presence_penalty=1.0, logit_bias={1: 1.0, 2: 2.0})
    small = make_request(2, bad_words=((5,),))
    sampler = sampler_for(long, wide, small)
    inputs = inputs_of(sampler, long, wide, small)
    assert inputs.is_left.tolist() == [0, 1, 0]
    assert list_of(inputs.biased, 1) == list_of(inputs.counted, 1) == []
    assert list_of(inputs.masked, 2) == [5]
    assert inputs.slots[1] not in inputs.fresh_slots
    again = inputs_of(sampler, wide, long)
    assert again.is_left.tolist() == [0, 0] and list_of(again.counted, 0) == [1]
    assert again.fresh_slots.tolist() == [again.slots[0]]


def test_what_is_told_does_not_move_with_the_request() -> None:
    request = make_request(0, prompt=(5, 6), presence_penalty=1.0)
    inputs = inputs_of(sampler_for(request), request)
    generate(request, 9)
    assert list_of(inputs.counted, 0) == [5, 6]
    assert inputs.uniforms.tolist() == [0.0]


def test_rows_that_are_left_are_sampled_on_the_host() -> None:
    requests = [make_request(i, seed=i, log_probs=True, temperature=1.0) for i in range(3)]
    sampler = sampler_for(*requests)
    rows = sampler.rows(requests)
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    every = sampler.sample(rows, logits.copy())
    sampled = SampledRows(
        token_ids=np.array([50, 51, 52], dtype=np.int32),
        log_probs=np.array([-1, -2, -3], dtype=np.float32),
        left=np.array([0, 2]),
    )
    both = sampler.complete(rows, sampled, logits[[0, 2]])
    assert both.token_ids.tolist() == [every.token_ids[0], 51, every.token_ids[2]]
    assert both.log_probs.tolist() == [every.log_probs[0], -2, every.log_probs[2]]
    none = sampler.complete(
        rows,
        SampledRows(token_ids=sampled.token_ids, log_probs=sampled.log_probs, left=np.arange(0)),
        np.empty((0, VOCABULARY), dtype=np.float32),
    )
    assert none.token_ids.tolist() == [50, 51, 52]


@pytest.mark.parametrize("num_slots", [1, 3])
@given(data=st.data())
def test_no_two_requests_of_an_iteration_share_a_slot(num_slots: int, data: st.DataObject) -> None:
    """Against a dictionary: who keeps a slot, and who is told to have a new one."""
    slots = SequenceSlots(num_slots)
    known: dict[int, int] = {}
    for _ in range(data.draw(st.integers(0, 20))):
        if data.draw(st.booleans()):
            gone = data.draw(st.integers(0, 6))
            slots.give_back(gone)
            known.pop(gone, None)
            continue
        ids = data.draw(st.lists(st.integers(0, 6), max_size=num_slots, unique=True))
        taken, new = slots.take(ids)
        by_id: dict[int, Any] = dict(zip(ids, taken.tolist(), strict=True))
        assert len(set(by_id.values())) == len(ids)
        assert all(0 <= slot < num_slots for slot in by_id.values())
        assert all(by_id[ids[i]] == known[ids[i]] for i in range(len(ids)) if i not in new)
        known = {i: s for i, s in known.items() if s not in by_id.values()} | by_id
