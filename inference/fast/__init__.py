"""What exists only to be fast: kernels in C and CUDA, encoded products, huge pages, recordings.

Nothing outside imports this. The rows of BACKENDS open these backends. The rest of inference
knows their extras by the protocols of backends/recorded.py.
"""
