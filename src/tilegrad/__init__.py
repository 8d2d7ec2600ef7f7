"""Exact, hand-derived backward passes for transformers, in memory planned to the byte."""
