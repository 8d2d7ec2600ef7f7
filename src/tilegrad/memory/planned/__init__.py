"""Planned memory: the address of every buffer is known before the first step."""
