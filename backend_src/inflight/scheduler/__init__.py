"""Decides which requests run in an iteration; reads everything, changes nothing. See README.md."""

from inflight.api.kv import PrefixMatch
from inflight.scheduler.ports import KvCapacity
from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.waiting_queue import WaitingQueue, rank_key, rank_of

__all__ = ["KvCapacity", "PrefixMatch", "Scheduler", "WaitingQueue", "rank_key", "rank_of"]
