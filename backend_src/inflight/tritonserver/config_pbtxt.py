"""Renders the config.pbtxt of each model from the contract.

``python -m inflight.tritonserver.config_pbtxt model_repository`` writes them; a test keeps the
committed files equal to the rendering. They hold no values of configuration: those come from
``api/config.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from inflight.tritonserver.contract import MAX_BATCH_SIZE
from inflight.tritonserver.contract.models import (
    Declared,
    Model,
    Step,
    ensemble_steps,
    inputs_of,
    outputs_of,
)

_HEADER = (
    "# Written by python -m inflight.tritonserver.config_pbtxt: change the contract, not this.\n"
)

_ONE_INSTANCE = {
    Model.POSTPROCESSING: "# Several would send the responses of a stream out of order.\n",
    Model.ENSEMBLE_SYNC: "# It answers many requests at once: execute() never waits.\n",
}

_INSTANCES = {
    Model.INFLIGHT_LLM: 1,
    Model.PREPROCESSING: 2,
    Model.POSTPROCESSING: 1,
    Model.ENSEMBLE_SYNC: 1,
}

_DECOUPLED = "\nmodel_transaction_policy { decoupled: true }\n"


def render(model: Model) -> str:
    """The whole text of ``model_repository/<model>/config.pbtxt``."""
    ensemble = model is Model.ENSEMBLE
    parts = [
        _HEADER,
        f'name: "{model.value}"\n',
        'platform: "ensemble"\n' if ensemble else 'backend: "python"\n',
        f"max_batch_size: {MAX_BATCH_SIZE}\n",
    ]
    if model is Model.INFLIGHT_LLM:
        parts.append(_DECOUPLED)
    parts.append(_tensors("input", inputs_of(model), " optional: true"))
    parts.append(_tensors("output", outputs_of(model), ""))
    if ensemble:
        parts.append(_scheduling(ensemble_steps()))
    else:
        parts.append("\n" + _ONE_INSTANCE.get(model, ""))
        parts.append(f"instance_group [ {{ kind: KIND_CPU count: {_INSTANCES[model]} }} ]\n")
    return "".join(parts)


def _tensors(kind: str, tensors: Iterable[Declared], flags: str) -> str:
    rows = [
        f'  {{ name: "{name}" data_type: TYPE_{dtype.value} '
        f"dims: [ {', '.join(map(str, dims))} ]{flags} }}"
        for name, dtype, dims in tensors
    ]
    return f"\n{kind} [\n" + ",\n".join(rows) + "\n]\n"


def _scheduling(steps: Iterable[Step]) -> str:
    rendered = []
    for model, input_map, output_map in steps:
        lines = [f'      model_name: "{model.value}"', "      model_version: -1"]
        for kind, pairs in (("input_map", input_map), ("output_map", output_map)):
            lines += [f'      {kind} {{ key: "{key}" value: "{value}" }}' for key, value in pairs]
        rendered.append("    {\n" + "\n".join(lines) + "\n    }")
    return "\nensemble_scheduling {\n  step [\n" + ",\n".join(rendered) + "\n  ]\n}\n"


def main(arguments: list[str]) -> int:
    """Writes every config.pbtxt under the repository folder named by the one argument."""
    if len(arguments) != 1:
        print("usage: python -m inflight.tritonserver.config_pbtxt MODEL_REPOSITORY")
        return 2
    for model in Model:
        path = Path(arguments[0]) / model.value / "config.pbtxt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(model), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
