"""The project's own benchmarks, next to their dated results: `python -m benchmarks.training --help`. Not part of the wheel."""
