"""Data: text becomes tokens, and tokens become the batches of a run.

text/           Source files, and the documents and records in them.
tokens/         Tokenizers, and the token files that they make from documents.
samples/        Samples cut from tokens, their order, and the loader.
run_sources     Finds what the sources of a run file stand for.
prepare         Finds, tokenizes and opens the data of a run.
cache           Directories that one process builds and many share.
inspection      Shows samples and documents as text: `meshtrain data inspect`.
"""
