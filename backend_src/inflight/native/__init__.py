"""The native plugin: C++ kernels for CPUs, compiled on the machine that runs them.

``build`` needs no torch, so that ``inflight serve`` can compile before anything is loaded.
"""
