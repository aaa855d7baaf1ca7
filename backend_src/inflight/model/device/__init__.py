"""The fused decoder on a GPU, or on any torch device that stands in for one."""
