"""Tables, atomic file writes, reading untrusted files, spelling, and the environment of a measurement."""
