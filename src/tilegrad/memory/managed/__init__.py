"""Managed memory: typed buffers handed out on demand."""
