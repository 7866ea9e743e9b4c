"""Causes that show in the tokenizers of two models, and on which texts."""
