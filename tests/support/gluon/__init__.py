"""A Gluon emulator: README.md."""
