"""Planned memory: every byte known before the first step."""
