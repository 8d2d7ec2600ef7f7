"""Text → batches: documents are read, tokenized, stored as one file of tokens, and cut into windows or packed into rows."""
