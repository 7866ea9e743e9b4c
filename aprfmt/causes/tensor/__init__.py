"""Causes that show in two tensors of one role, or in several together, without a pass."""
