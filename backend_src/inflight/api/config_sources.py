"""Where configuration comes from: each source as a mapping of keys to values, nothing validated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from inflight.errors import ConfigError

ENVIRONMENT_PREFIX = "INFLIGHT_"
CONFIG_FILE_VARIABLE = "INFLIGHT_CONFIG"

_TRITON_OWN_PARAMETERS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})


def from_file(path: Path) -> dict[str, Any]:
    """A YAML file. Raises ConfigError where it cannot be read or is not a mapping."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path}: must be a mapping of keys to values")
    return {str(key): value for key, value in loaded.items()}


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Variables with our prefix; an empty one is unset."""
    return {
        name[len(ENVIRONMENT_PREFIX) :].lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name != CONFIG_FILE_VARIABLE and value != ""
    }


def from_parameters(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Triton's model parameters without its own; an empty one is unset."""
    return {
        key: value
        for key, value in parameters.items()
        if key not in _TRITON_OWN_PARAMETERS and value != ""
    }


def environment_of(values: Mapping[str, object]) -> dict[str, str]:
    """The environment variables that set these keys for a process started with them."""
    return {ENVIRONMENT_PREFIX + key.upper(): str(value) for key, value in values.items()}
