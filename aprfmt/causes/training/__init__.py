"""Causes of a wrong training step: of its update, and of its gradients."""
