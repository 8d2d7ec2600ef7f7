"""Tables, files that are whole or absent, and what a result was measured on."""
