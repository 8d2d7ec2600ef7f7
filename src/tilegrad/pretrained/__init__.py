"""Weights of Hugging Face folders and GGUF files, in and out."""
