"""Running models: backends, the forward pass with capture points, traces, losses and parity."""
