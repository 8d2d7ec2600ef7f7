"""What the specification asks for by name: shared backward buffers, its flash-attention cases, its memory table."""
