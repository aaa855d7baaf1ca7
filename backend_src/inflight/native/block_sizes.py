"""How many tokens a KV block of the native kernels may hold."""

from __future__ import annotations

SUPPORTED_TOKENS_PER_BLOCK = (16, 32, 64, 128)
"""32 and more let wide tiles (AMX) be used where the CPU has them."""
