"""Parts that the specification names: shared backward buffers, its flash-attention cases, its memory table."""
