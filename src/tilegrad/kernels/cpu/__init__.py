"""The native CPU library: how it is built and loaded."""
