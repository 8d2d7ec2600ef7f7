"""A Gluon emulator."""
