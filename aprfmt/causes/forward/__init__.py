"""Causes that show in a forward pass: hypotheses, and the divergence they are tried on."""
