"""A run file and a machine file for tests of `meshtrain plan`."""

from pathlib import Path

RUN = """
run_directory = "run"
steps = 10
global_batch_size = 16
micro_batch_size = 4
[model]
type = "llama"
[model.config]
vocab_size = 8000
hidden_size = 256
intermediate_size = 704
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 4
[data]
sequence_length = 256
[data.tokenizer]
path = "does-not-exist"
[optimizer]
learning_rate = 1e-3
[plan.mesh]
pp = 2
"""
MACHINE = 'memory_gib = {memory}\nreserved_gib = 0.0\nfragmentation = 0.0\nsource = "a test"\n'


def write_run(directory: Path, text: str = RUN) -> str:
    """Write a run file, and return its path."""
    file = directory / "run.toml"
    file.write_text(text)
    return str(file)


def write_machine(directory: Path, memory: float) -> str:
    """Write a machine file, and return its path.

    Args:
        memory: in GiB.
    """
    file = directory / "machine.toml"
    file.write_text(MACHINE.format(memory=memory))
    return str(file)
