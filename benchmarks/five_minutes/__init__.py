"""`python -m benchmarks.five_minutes` shows which training step reaches the lowest loss in five minutes."""
