"""From logits to tokens, in numpy. See README.md of this folder."""

from inflight.sampling.sampler import SampledTokens, Sampler

__all__ = ["SampledTokens", "Sampler"]
