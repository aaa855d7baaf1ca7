"""The public contract: every tensor and request parameter of the repository, in one table.

The ``config.pbtxt`` files and the table in docs/requests.md are rendered from it, requests are read
with it, and responses are built with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from inflight.tritonserver.contract import vllm
from inflight.tritonserver.contract.inputs import SERVED as SERVED_INPUTS
from inflight.tritonserver.contract.outputs import SERVED as OUTPUTS
from inflight.tritonserver.contract.outputs import TEXT_OUTPUT, UNSERVED
from inflight.tritonserver.contract.refused import REFUSED as REFUSED_INPUTS
from inflight.tritonserver.contract.types import Dtype, InputField, OutputField, Refusal

__all__ = [
    "INPUTS",
    "MAX_BATCH_SIZE",
    "OUTPUTS",
    "OUTPUT_BY_NAME",
    "SERVED_INPUTS",
    "TEXT_OUTPUT",
    "UNSERVED",
    "Dtype",
    "InputField",
    "OutputField",
    "Refusal",
    "field_of_parameter",
    "field_of_tensor",
    "vllm",
]

MAX_BATCH_SIZE = 64
"""Prompts in one Triton request; another thing than the engine's max_batch_size."""

INPUTS: tuple[InputField, ...] = SERVED_INPUTS + REFUSED_INPUTS

OUTPUT_BY_NAME: Mapping[str, OutputField] = {output.name: output for output in OUTPUTS}

_BY_TENSOR = {name: entry for entry in INPUTS for name in entry.tensor_names}
_BY_PARAMETER = {
    name: entry for entry in INPUTS for name in (*entry.tensor_names, *entry.parameter_names)
}


def field_of_tensor(name: str) -> InputField | None:
    """The field that an input tensor states; None for a tensor that is no public one."""
    return _BY_TENSOR.get(name)


def field_of_parameter(name: str) -> InputField | None:
    """The field that a request parameter states, in snake_case or in the Executor's camelCase.

    None for a parameter that nobody knows; such parameters are tolerated.
    """
    return _BY_PARAMETER.get(name) or _BY_PARAMETER.get(_snake_case(name))


def _snake_case(name: str) -> str:
    """topPMin -> top_p_min, cacheSaltID -> cache_salt_id."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return re.sub(r"([A-Z])([A-Z][a-z])", r"\1_\2", spaced).lower()
