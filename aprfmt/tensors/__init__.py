"""What a tensor is: stored, logical, packed in parts, restored; statistics and digests."""
