"""Building and loading C++. The lowest layer: it imports no other module of the package."""
