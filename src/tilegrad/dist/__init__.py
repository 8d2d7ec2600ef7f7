"""Ranks: the process group and its collectives, and when a step may start them."""
