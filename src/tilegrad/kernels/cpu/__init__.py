"""The native CPU library: its C++ sources, its structures and its loading. `native/build.py` compiles it."""
