"""The engine's records: LlmRequest (the one mutable one) and the frozen ScheduledBatch."""

from inflight.batch.llm_request import LlmRequest, RequestState
from inflight.batch.plan import Phase, ScheduledBatch, ScheduledChunk

__all__ = ["LlmRequest", "Phase", "RequestState", "ScheduledBatch", "ScheduledChunk"]
