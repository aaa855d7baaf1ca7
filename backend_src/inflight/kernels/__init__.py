"""Kernels in Triton's language with their torch-callable functions."""
