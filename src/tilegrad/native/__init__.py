"""How C++ is built and loaded. The lowest layer: it imports nothing else of the package."""
