"""Import and export of weights: Hugging Face folders and GGUF files."""
