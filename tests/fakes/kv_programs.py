"""KvProgram: a KV cache driven as an engine would, and everything it holds read back.

Whoever runs it chooses by a ``random.Random``: seeded, or hypothesis's own, which shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from inflight.api import KvCacheConfig
from inflight.api.kv_pools import KvGroup, KvPool
from inflight.errors import OutOfBlocksError
from inflight.kv_cache import (
    KvCache,
    KvCacheManager,
    KvExtent,
    PrefixIdentity,
    make_kv_cache,
)
from inflight.kv_cache.retention import DEFAULT_RETENTION
from tests.fakes.checked_kv_store import CheckedKvStore
from tests.fakes.kv_program_checks import (
    OpenRequest,
    check_match,
    check_peaks,
    first_seen,
    needed_blocks,
)
from tests.fakes.kv_program_choices import OUTCOMES, PREFIXES, SALTS, a_retention
from tests.fakes.kv_program_tally import Tally, Tier
from tests.fakes.kv_with_stores import KvWithStores

MAX_OPEN = 6


class KvProgram:
    """Two token ids, short prompts and a small pool: equal prefixes and shortage are frequent.

    ``windows``: of each pool.
    """

    def __init__(self, rng: Random, tally: Tally, windows: Sequence[int | None] = (None,)) -> None:
        self.rng = rng
        self.tally = tally
        self.now = 0.0
        self.has_tier = tuple(windows) == (None,)
        num_blocks, size = rng.randint(3, 20), rng.randint(1, 4)
        config = KvCacheConfig(
            tokens_per_block=size,
            enable_block_reuse=rng.random() < 0.8,
            enable_partial_reuse=rng.random() < 0.8,
            copy_on_partial_reuse=rng.random() < 0.7,
        )
        sizes = [num_blocks, *(rng.randint(3, 20) for _ in windows[1:])]
        pools = [
            KvPool(KvGroup(window, (), 1), number)
            for window, number in zip(windows, sizes, strict=True)
        ]
        stores = [CheckedKvStore(pool.num_blocks, size) for pool in pools]
        self.tier = Tier(stores[0])
        self.kv: KvCache = make_kv_cache(
            pools,
            config,
            clock=lambda: self.now,
            observers=(self.tier,) if self.has_tier else (),
        )
        self.held = KvWithStores(self.kv, stores)
        self.requests = self.held.requests
        self.num_opened = 0

    def run(self, num_steps: int) -> None:
        """So many steps, with every check after each."""
        for _ in range(num_steps):
            step = self._next_step()
            step()
            self.held.check()
            self.tally.steps += 1
        self.tally.evicted += self.kv.stats().evicted_blocks

    def _next_step(self) -> Callable[[], None]:
        if not self.requests:
            return self.open
        if len(self.requests) > MAX_OPEN:
            return self.close
        steps = (
            *(self.open, self.iterate, self.iterate, self.iterate, self.iterate),
            *(self.pause, self.close, self.close, self.fork, self.too_much, self.wait),
            self.onboard,
        )
        return self.rng.choice(steps)

    # What happens.

    def open(self) -> None:
        """A family of requests with a common prefix."""
        salt, common = self.rng.choice(SALTS), self.rng.choice(PREFIXES)
        for _ in range(self.rng.randint(1, 3)):
            tokens = common + [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 4))]
            self.kv.open(self._next_id(), PrefixIdentity(salt), a_retention(self.rng, len(tokens)))
            self.requests[self.num_opened] = OpenRequest(salt, tokens)

    def iterate(self) -> None:
        """One iteration over some of the requests: reserve, copy, write, and mostly commit."""
        chosen = sorted(self.requests)
        if self.rng.random() < 0.5:
            chosen = self.rng.sample(chosen, self.rng.randint(1, len(chosen)))
        plan = [self._extent(request_id) for request_id in chosen]
        needed = [
            [needed_blocks(pool, self.requests, extent) for extent in plan]
            for pool in self.kv.pools
        ]
        before, free = self.held.observable(), self.held.free()
        try:
            copies = self.kv.reserve(plan)
        except OutOfBlocksError:
            self.tally.refused += 1
            assert self.held.observable() == before
            assert any(sum(of_pool) > n for of_pool, n in zip(needed, free, strict=True))
            return
        of_pools = (copies, *copies.further)
        self._count(plan, len(copies.target_ids))
        for of_pool in of_pools:
            targets = of_pool.target_ids.tolist()
            assert len(set(targets)) == len(targets)
            assert not set(targets) & set(of_pool.source_ids.tolist())
        for extent in plan:
            self.requests[extent.request_id].started = True
            self.requests[extent.request_id].written = extent.start
        self.kv.check_integrity()
        check_peaks(self.kv, plan)
        left = self.held.free_but_for_sources(chosen)
        taken = [n - rest for n, rest in zip(free, left, strict=True)]
        assert len(plan) != 1 or taken == [of_pool[0] for of_pool in needed]
        outcome = self.rng.choice(OUTCOMES)
        if outcome != "not even copied":
            self.held.copy(copies)
        if outcome == "written":
            self.tally.passed += self.held.write(plan)
            self.kv.commit(plan)
        else:
            self._fail(plan, outcome == "failed and retried")

    def pause(self) -> None:
        self.tally.pauses += 1
        request_id = self._pick()
        expected = self.held.free_without(request_id)
        self.kv.release(request_id)
        self.requests[request_id].pause()
        assert self.held.free() == expected

    def close(self) -> None:
        request_id = self._pick()
        expected = self.held.free_without(request_id)
        self.kv.close(request_id)
        request = self.requests.pop(request_id)
        self.tier.seen.append((request.salt, request.tokens))
        assert self.held.free() == expected

    def fork(self) -> None:
        """Beams: they go on with tokens of their own from what is written."""
        parent_id = self._pick()
        parent = self.requests[parent_id]
        child_ids = [self._next_id() for _ in range(self.rng.randint(1, 2))]
        free = self.held.free()
        self.kv.fork(parent_id, child_ids)
        assert self.held.free() == free
        kept = max(parent.written, 1) if parent.started else len(parent.tokens)
        for child_id in child_ids:
            tokens = parent.tokens[:kept]
            self.requests[child_id] = OpenRequest(
                parent.salt, tokens, parent.written, parent.started
            )
        self.tally.forks += 1

    def too_much(self) -> None:
        """A plan that cannot fit changes nothing."""
        request_id = self._pick()
        request = self.requests[request_id]
        plan = [self._extent(other_id) for other_id in sorted(self.requests.keys() - {request_id})]
        start = request.written if request.started else 0
        end = start + self.kv.num_blocks * self.kv.tokens_per_block + 1
        endless = np.zeros(end, dtype=np.int32)
        endless[: len(request.tokens)] = request.tokens[: len(endless)]
        extent = KvExtent(request_id, start, endless)
        plan.insert(self.rng.randint(0, len(plan)), extent)
        before = self.held.observable()
        try:
            self.kv.reserve(plan)
        except OutOfBlocksError:
            assert self.held.observable() == before
        else:
            raise AssertionError("more was reserved than there is")

    def onboard(self) -> None:
        """Somebody asks again what was asked before; what was evicted of it comes back, and the
        checks read it."""
        if not self.tier.seen or not isinstance(self.kv, KvCacheManager) or not self.has_tier:
            return
        if self.rng.random() < 0.5:
            self._evict_all()
        salt, tokens = self.rng.choice(self.tier.seen)
        request_id = self._next_id()
        self.kv.open(request_id, PrefixIdentity(salt))
        request = self.requests[request_id] = OpenRequest(salt, [*tokens, self.rng.randint(0, 1)])
        contents = self.tier.contents_of(self.kv.missing_blocks(request_id, request.array()))
        free = self.kv.num_free_blocks

        def write(block_ids: npt.NDArray[np.int32]) -> None:
            self.held.stores[0].write_blocks(block_ids, contents[: len(block_ids)])

        number = self.kv.onboard(
            request_id, request.array(), [DEFAULT_RETENTION] * len(contents), write
        )
        assert number <= len(contents) and self.kv.num_free_blocks == free
        match = self.kv.match_prefix(request_id, request.array())
        assert match.num_tokens >= number * self.kv.tokens_per_block
        self.tally.onboarded += number

    def _evict_all(self) -> None:
        """Somebody takes every free block, and gives it back unwritten."""
        if self.kv.num_free_blocks == 0:
            return
        request_id = self._next_id()
        self.kv.open(request_id)
        tokens = np.ones(self.kv.num_free_blocks * self.kv.tokens_per_block, dtype=np.int32)
        self.kv.reserve([KvExtent(request_id, 0, tokens)])
        self.kv.close(request_id)

    def wait(self) -> None:
        self.now += self.rng.choice((0.5, 5.0))

    # How an iteration is made.

    def _next_id(self) -> int:
        self.num_opened += 1
        return self.num_opened

    def _pick(self) -> int:
        return self.rng.choice(sorted(self.requests))

    def _extent(self, request_id: int) -> KvExtent:
        request, size = self.requests[request_id], self.kv.tokens_per_block
        start = request.written
        if not request.started:
            match = self.kv.match_prefix(request_id, request.array())
            start = match.num_tokens
            reusable = check_match(self.kv, request_id, request.tokens, match)
            if self.rng.random() < 0.3:
                start = self.rng.choice(reusable) * size
            passed = [first_seen(pool, start) // size for pool in self.kv.pools]
            self.tally.reused_windows += max(passed) > 0
        elif start == len(request.tokens):
            request.tokens.append(self.rng.randint(0, 1))
        remaining = len(request.tokens) - start
        num_tokens = remaining if self.rng.random() < 0.5 else self.rng.randint(1, remaining)
        return KvExtent(request_id, start, request.array()[: start + num_tokens])

    def _count(self, plan: list[KvExtent], num_copies: int) -> None:
        size = self.kv.tokens_per_block
        num_parts = sum(
            not self.requests[e.request_id].started and e.start % size > 0 for e in plan
        )
        num_own = sum(self.requests[e.request_id].started and e.start % size > 0 for e in plan)
        self.tally.reused_parts += num_parts
        if num_own == 0:
            self.tally.taken_over += num_parts - num_copies
        elif num_parts == 0:
            self.tally.own_copies += num_copies

    def _fail(self, plan: list[KvExtent], retried: bool) -> None:
        """A forward that failed: its requests start again, or end."""
        self.tally.failures += 1
        self.held.spoil(plan)
        for extent in plan:
            if retried:
                self.kv.release(extent.request_id)
                self.requests[extent.request_id].pause()
            else:
                self.kv.close(extent.request_id)
                del self.requests[extent.request_id]
