"""Our own decoder: a small description of the model, run as a loop over a few fused operations."""
