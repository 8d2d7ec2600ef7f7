"""Parts that the specification asks for: shared backward buffers, cases of flash attention, a memory table."""
