"""Pretrained weights: each process reads only its own slices of the safetensors files.

block_reader: reads blocks of tensors from files into existing memory.
hub_layout: finds the state of a stock model in the files, by transformers' own conversion table.
lazy_tensor: tensors without values that record operations on tensors in files.
load: fills the parameters of a process from a Hugging Face directory, with rows for new tokens.
operations: the recorded operations, each of which can read any block of its result.
safetensors_files: the positions of tensors in safetensors files.
"""
