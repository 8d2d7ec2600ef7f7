"""Which training step reaches the lowest loss in five minutes: `python -m benchmarks.five_minutes`."""
