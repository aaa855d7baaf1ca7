"""load_sampling_kernels: the native ones, where they can be had."""

from __future__ import annotations

from inflight.native.build import NativeUnavailableError, build_native
from inflight.native.library import NativeLibrary
from inflight.native.sampling import NativeSampling


def load_sampling_kernels(cache_dir: str) -> NativeSampling | None:
    """None where there is no native library; ``load_runner`` has logged why."""
    try:
        return NativeSampling(NativeLibrary(build_native(cache_dir)))
    except (NativeUnavailableError, OSError):
        return None
