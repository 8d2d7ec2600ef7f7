"""GGUF, the file of llama.cpp and Ollama: a model in one file, with its tokenizer.

container       the bytes: metadata, the table of tensors, dequantization; every count is checked before it is used
architecture    metadata ↔ config.json, and names and layouts of tensors
tokenizer       metadata ↔ tokenizer.json and tokenizer_config.json
files           a .gguf into a folder of weights, and a model into a .gguf

The package `gguf` of llama.cpp knows block formats, names of tensors and how a file is written.
"""
