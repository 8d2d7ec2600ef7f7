"""The build and the loading of C++ code. This is the lowest layer, which imports no other module of the package."""
