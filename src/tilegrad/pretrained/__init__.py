"""Weights of Hugging Face folders, in and out."""
