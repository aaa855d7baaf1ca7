"""``inflight doctor``: what this machine has, what that means for serving, and what to do."""
