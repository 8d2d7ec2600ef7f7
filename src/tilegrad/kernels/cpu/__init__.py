"""Building and loading of the native CPU library."""
