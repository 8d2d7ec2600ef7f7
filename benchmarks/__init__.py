"""Benchmarks of the project, next to their dated results: `python -m benchmarks.training --help`. Not in the wheel."""
