"""What every model.py does first: configuration, checkpoint, and faults in one line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import triton_python_backend_utils as pb_utils

from inflight.api.config import InflightConfig
from inflight.checkpoint import prepare_checkpoint
from inflight.errors import ConfigError
from inflight.observability import log
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Started = TypeVar("Started")


def parameters_of(args: Mapping[str, str]) -> dict[str, str]:
    """The ``parameters`` of the model configuration in ``initialize``'s argument."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return {key: str(value["string_value"]) for key, value in parameters.items()}


def start(args: Mapping[str, str], factory: Callable[[Mapping[str, str]], Started]) -> Started:
    """``factory`` of the model's parameters.

    A ConfigError becomes the server's own exception, so that the log says what is wrong in one line
    and not by a traceback of ours.
    """
    try:
        return factory(parameters_of(args))
    except ConfigError as error:
        raise pb_utils.TritonModelException(str(error)) from None


def load_tokenizer(parameters: Mapping[str, str]) -> tuple[InflightConfig, Tokenizer]:
    """The configuration, and the tokenizer of the checkpoint that it names; sets up logging.

    Raises ConfigError, and CheckpointError where the checkpoint has no tokenizer.
    """
    config = InflightConfig.load(parameters=parameters)
    log.configure(config.log_level)
    checkpoint = prepare_checkpoint(config.model_dir, config.cache_dir, progress=logger.info)
    return config, Tokenizer.from_directory(checkpoint.directory)
