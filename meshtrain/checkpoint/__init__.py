"""Save, load, verify and convert the checkpoints of a run, on any mesh.

- `manifest`: the file of a checkpoint that describes its tensors and all other files.
- `saver`: save checkpoints while training waits, or in the background.
- `parallelized`: save weights without optimizer state, one file per process.
- `show`: the commands `meshtrain checkpoint list` and `meshtrain checkpoint verify`.
- `dcp`: tensors in the files of torch's distributed checkpoints (DCP).
- `huggingface`: weights, configuration and tokenizer in Hugging Face folders.
- `storage`: where checkpoints are stored, how they are published, removed and verified.
"""
