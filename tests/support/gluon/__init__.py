"""A Gluon emulator, described in README.md."""
