"""The training step, the decoder and the scorer, each in memory that is planned before it runs."""
