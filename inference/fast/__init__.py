"""What exists only to be fast: kernels in C and CUDA, encoded products, huge pages, recordings.

Nothing outside imports this. The rows of BACKENDS open these backends, and what they lend to a
readable backend it knows by the protocols of backends/speed.py.
"""
