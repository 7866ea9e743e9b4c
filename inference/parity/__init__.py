"""Parity: one model, several runs, point by point, with a verdict and a minimal reproduction."""
