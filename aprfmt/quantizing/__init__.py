"""Which encoding every tensor gets when a model is quantized, and its rows encoded."""
