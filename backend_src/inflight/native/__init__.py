"""The native plugin: C++ kernels for CPUs, compiled on the machine that runs them."""

from inflight.native.library import NativeLibrary, load_native

__all__ = ["NativeLibrary", "load_native"]
