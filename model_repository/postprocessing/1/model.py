"""Token ids to text. The work is in inflight.tritonserver.postprocessing."""

from __future__ import annotations

from inflight.tritonserver.postprocessing import Postprocessing
from inflight.tritonserver.startup import start


class TritonPythonModel:
    def initialize(self, args):
        self._postprocessing = start(args, Postprocessing.start)

    def execute(self, requests):
        return self._postprocessing.execute(requests)
