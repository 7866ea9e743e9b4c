"""What a run will allocate, from headers: the forward pass itself, on arrays without numbers."""
