"""inflight_llm for clients that cannot stream. The work is in inflight.tritonserver.sync."""

from __future__ import annotations

from inflight.tritonserver.sync import SyncService


class TritonPythonModel:
    def initialize(self, args):
        self._service = SyncService()

    async def execute(self, requests):
        await self._service.execute(requests)
