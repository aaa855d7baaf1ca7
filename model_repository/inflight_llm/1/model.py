"""The engine: a decoupled model. The work is in inflight.tritonserver.service."""

from __future__ import annotations

from inflight.tritonserver.service import LlmService
from inflight.tritonserver.startup import start


class TritonPythonModel:
    """``execute`` hands requests over and returns; the service answers them as tokens come."""

    def initialize(self, args):
        name, version = args["model_name"], args["model_version"]
        self._service = start(args, lambda parameters: LlmService.start(parameters, name, version))

    def execute(self, requests):
        for request in requests:
            self._service.submit(request)

    def finalize(self):
        self._service.close()
