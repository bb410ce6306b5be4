"""Tokens: tokenizers, and the files of tokens that they make from text.

tokenizer           Finds and loads tokenizers.
tokenizer_training  Trains a byte-level BPE: `meshtrain tokenizer train`.
cutting             Splits long documents without a change of their tokens.
encoding            Encodes chunks of text in one process.
workers             Encodes in many processes.
encoding_worker     Is the program of each of these processes.
part_writer         Writes one token file block by block.
journal             Describes a job, and stores its progress.
tokenizing          Tokenizes a corpus into token files.
tokenize_command    Writes token files into a directory: `meshtrain tokenize`.
scanning            Counts and checks the tokens on disk.
token_file          Describes and opens the token file of meshtrain.
megatron            Reads and writes the token files of Megatron-LM.
tokenized_source    Opens either kind of token file.
"""
