"""Random programs against a store whose content shows any block that points to a wrong place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.errors import OutOfBlocksError
from inflight.kv_cache import KvCacheManager, KvExtent
from tests.fakes.checked_kv_store import CheckedKvStore

SALTS = st.sampled_from([None, "", "tenant"])
TOKENS = st.integers(0, 1)  # two token ids make equal prefixes frequent
PROMPTS = st.lists(TOKENS, min_size=1, max_size=14)
PREFIXES = st.sampled_from([[0] * 8, [0] * 5, [0, 0, 1, 1, 0, 0, 1, 1], []])
SUFFIXES = st.lists(TOKENS, min_size=1, max_size=4)
OUTCOMES = st.sampled_from(["written", "written", "written", "failed", "failed and retried"])


@dataclass
class OpenRequest:
    salt: str | None
    tokens: list[int]
    written: int = 0
    """Tokens whose KV the store has."""
    started: bool = False

    def array(self) -> np.ndarray:
        return np.array(self.tokens, dtype=np.int32)

    def pause(self) -> None:
        self.written = 0
        self.started = False


class KvCachePrograms(RuleBasedStateMachine):
    """Opens, computes, pauses and closes requests as an engine would, failures included."""

    @initialize(
        num_blocks=st.integers(2, 16), tokens_per_block=st.integers(1, 4), reuse=st.booleans()
    )
    def make(self, num_blocks: int, tokens_per_block: int, reuse: bool) -> None:
        self.kv = KvCacheManager(num_blocks, tokens_per_block, enable_block_reuse=reuse)
        self.store = CheckedKvStore(num_blocks, tokens_per_block)
        self.reuse = reuse
        self.requests: dict[int, OpenRequest] = {}
        self.num_opened = 0

    @rule(salt=SALTS, common=PREFIXES, suffixes=st.lists(SUFFIXES, min_size=1, max_size=3))
    def open(self, salt: str | None, common: list[int], suffixes: list[list[int]]) -> None:
        """A family of requests with a common prefix."""
        for suffix in suffixes:
            self.num_opened += 1
            self.kv.open(self.num_opened, salt)
            self.requests[self.num_opened] = OpenRequest(salt, common + suffix)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def iterate(self, data: st.DataObject) -> None:
        """One iteration over some of the requests: reserve, write, and mostly commit."""
        open_ids = sorted(self.requests)
        chosen = data.draw(
            st.just(open_ids) | st.lists(st.sampled_from(open_ids), min_size=1, unique=True)
        )
        plan = [self._extent(request_id, data) for request_id in chosen]
        needed = [self._needed(extent) for extent in plan]
        before, free = self._observable(), self.kv.num_free_blocks
        try:
            self.kv.reserve(plan)
        except OutOfBlocksError:
            assert self._observable() == before
            assert sum(needed) > free
            return
        assert len(plan) != 1 or free - self.kv.num_free_blocks == needed[0]
        for extent in plan:
            self.requests[extent.request_id].started = True
        outcome = data.draw(OUTCOMES)
        if outcome == "written":
            self._write(plan)
            self.kv.commit(plan)
            return
        for extent in plan:
            self.store.spoil(self.kv.block_table(extent.request_id), extent.start, extent.end)
            if outcome == "failed":
                self.kv.close(extent.request_id)
                del self.requests[extent.request_id]
            else:
                self.kv.release(extent.request_id)
                self.requests[extent.request_id].pause()

    def _extent(self, request_id: int, data: st.DataObject) -> KvExtent:
        request = self.requests[request_id]
        start = request.written
        if not request.started:
            match = self.kv.match_prefix(request_id, request.array())
            num_blocks, rest = divmod(match.num_tokens, self.kv.tokens_per_block)
            assert rest == 0 and match.num_tokens < len(request.tokens)
            assert 0 <= match.num_referenced_blocks <= num_blocks
            assert self.reuse or num_blocks == 0
            num_reused = data.draw(st.just(num_blocks) | st.integers(0, num_blocks))
            start = num_reused * self.kv.tokens_per_block
        elif start == len(request.tokens):
            request.tokens.append(data.draw(TOKENS))
        remaining = len(request.tokens) - start
        num_tokens = data.draw(st.just(remaining) | st.integers(1, remaining))
        return KvExtent(request_id, start, request.array()[: start + num_tokens])

    def _needed(self, extent: KvExtent) -> int:
        """Free blocks that the extent takes if it is alone in its plan; in company it may be less,
        because a cached prefix is taken once however many reuse it."""
        num_blocks = -(-extent.end // self.kv.tokens_per_block)
        if self.requests[extent.request_id].started:
            return num_blocks - self.kv.num_held_blocks(extent.request_id)
        match = self.kv.match_prefix(extent.request_id, self.requests[extent.request_id].array())
        # Who holds a block holds those before it, so the referenced ones come first.
        return num_blocks - min(
            match.num_referenced_blocks, extent.start // self.kv.tokens_per_block
        )

    def _write(self, plan: list[KvExtent]) -> None:
        for extent in plan:
            request = self.requests[extent.request_id]
            table = self.kv.block_table(extent.request_id)
            self.store.write(table, request.tokens[: extent.end], extent.start, request.salt)
            request.written = extent.end

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def reserve_too_much(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[request_id]
        other_ids = sorted(self.requests.keys() - {request_id})
        plan = [self._extent(other_id, data) for other_id in other_ids]
        room = self.kv.num_blocks * self.kv.tokens_per_block
        endless = np.zeros(room + 1, dtype=np.int32)
        endless[: len(request.tokens)] = request.tokens[: len(endless)]
        plan.insert(data.draw(st.integers(0, len(plan))), KvExtent(request_id, 0, endless))
        before = self._observable()
        with pytest.raises(OutOfBlocksError):
            self.kv.reserve(plan)
        assert self._observable() == before

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def pause(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        expected = self.kv.num_free_blocks + self.kv.num_releasable_blocks(request_id)
        self.kv.release(request_id)
        self.requests[request_id].pause()
        assert self.kv.num_free_blocks == expected

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def close(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        expected = self.kv.num_free_blocks + self.kv.num_releasable_blocks(request_id)
        self.kv.close(request_id)
        del self.requests[request_id]
        assert self.kv.num_free_blocks == expected

    @invariant()
    def the_books_add_up(self) -> None:
        self.kv.check_integrity()
        tables = [self.kv.block_table(request_id).tolist() for request_id in self.requests]
        held = {block_id for table in tables for block_id in table}
        assert self.kv.num_free_blocks == self.kv.num_blocks - len(held)
        if not self.reuse:
            assert len(held) == sum(map(len, tables))

    @invariant()
    def every_history_reads_as_it_was_written(self) -> None:
        for request_id, request in self.requests.items():
            table = self.kv.block_table(request_id)
            assert self.store.holds(table, request.tokens[: request.written], request.salt)

    def _observable(self) -> object:
        tables = {i: self.kv.block_table(i).tolist() for i in self.requests}
        counts = {i: self.kv.request_counts(i) for i in self.requests}
        order = [block.block_id for block in self.kv._pool.cached_blocks]
        empty = [block.block_id for block in self.kv._pool.empty_blocks]
        return tables, counts, order, empty, self.kv.stats()


KvCachePrograms.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None
)
TestKvCachePrograms = KvCachePrograms.TestCase


@settings(max_examples=150, deadline=None)
@given(
    tokens_per_block=st.integers(1, 4),
    programs=st.lists(st.tuples(SALTS, PROMPTS, st.booleans()), max_size=12),
)
def test_a_match_is_the_longest_prefix_that_was_ever_computed(
    tokens_per_block: int, programs: list[tuple[str | None, list[int], bool]]
) -> None:
    """In a pool that never evicts: against a set of every prefix, in whole blocks."""
    kv = KvCacheManager(200, tokens_per_block)
    computed: set[tuple[str | None, tuple[int, ...]]] = set()
    for request_id, (salt, tokens, stays) in enumerate(programs):
        array = np.array(tokens, dtype=np.int32)
        kv.open(request_id, salt)
        expected = 0
        for end in range(tokens_per_block, len(tokens), tokens_per_block):
            if (salt, tuple(tokens[:end])) in computed:
                expected = end
        assert kv.match_prefix(request_id, array).num_tokens == expected
        plan = [KvExtent(request_id, expected, array)]
        kv.reserve(plan)
        kv.commit(plan)
        for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
            computed.add((salt, tuple(tokens[:end])))
        if not stays:
            kv.close(request_id)
        kv.check_integrity()
