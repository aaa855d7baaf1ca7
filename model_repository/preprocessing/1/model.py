"""Text, chats and words to token ids. The work is in inflight.tritonserver.preprocessing."""

from __future__ import annotations

from inflight.tritonserver.preprocessing import Preprocessing
from inflight.tritonserver.startup import start


class TritonPythonModel:
    def initialize(self, args):
        self._preprocessing = start(args, Preprocessing.start)

    def execute(self, requests):
        return self._preprocessing.execute(requests)
