"""GGUF, the file format of llama.cpp and Ollama: a model in one file, with its tokenizer.

container       the bytes: metadata, the table of tensors, dequantization; every count is checked before it is used
architecture    metadata ↔ config.json, and names and layouts of tensors
tokenizer       metadata ↔ tokenizer.json and tokenizer_config.json
files           .gguf → a folder of weights, and a model → .gguf

Block formats, names of tensors and the writer of files come from llama.cpp's package `gguf`.
"""
