"""KvExtent: all that the KV cache ever hears about a scheduled chunk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class KvExtent(NamedTuple):
    """KV of tokens [start, end) of a request is about to be written (or was, in ``commit``).

    Where the request holds no blocks yet, [0, start) comes from reused blocks.
    """

    request_id: int
    start: int
    token_ids: npt.NDArray[np.int32]
    """int32[end]: all tokens of the sequence up to the end of the extent."""

    @property
    def end(self) -> int:
        return len(self.token_ids)
