"""Distances of tensors, capture points and texts, with their tolerances and reasons."""
