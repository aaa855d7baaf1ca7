"""Reply: the one owner of a Triton response sender."""

from __future__ import annotations

import logging
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

logger = logging.getLogger(__name__)


class Reply:
    """Everything sent to one Triton request goes through here, FINAL exactly once by construction.

    A request whose FINAL is never sent hangs its client for ever, and a send after FINAL is an
    error, so whoever answers calls ``finish`` and need not know who else may have. Thread-safe;
    nothing raises.
    """

    def __init__(self, sender: Any) -> None:
        """``sender``: what ``pb_request.get_response_sender()`` returned."""
        self._sender = sender
        self._lock = threading.Lock()
        self._is_broken = False
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def send(self, response: Any) -> bool:
        """Sends a response after which others follow. False: the client cannot be reached."""
        with self._lock:
            if self._is_finished or self._is_broken:
                return False
            try:
                self._sender.send(response)
            except Exception as error:  # the server's own exceptions; the client has gone
                self._is_broken = True
                logger.info("a response could not be sent: %s", type(error).__name__)
                return False
            return True

    def finish(self, response: Any) -> bool:
        """Sends the last response with FINAL. False: somebody has finished before, or it failed."""
        with self._lock:
            if self._is_finished:
                return False
            self._is_finished = True
            if not self._is_broken:
                try:
                    self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    return True
                except Exception as error:
                    logger.info("a final response could not be sent: %s", type(error).__name__)
            self._release()
            return False

    def is_client_gone(self) -> bool:
        """Has the client cancelled? Costs a round trip to the server."""
        try:
            return not self._is_finished and bool(self._sender.is_cancelled())
        except Exception as error:
            logger.info("cancellation could not be looked up: %s", type(error).__name__)
            return False

    def _release(self) -> None:
        """FINAL without data, so that at least the server forgets the request."""
        try:
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            logger.info("a reply could not be closed: %s", type(error).__name__)
