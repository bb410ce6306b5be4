"""Load pretrained weights into the shards of a pipeline."""

from pathlib import Path

from torch import nn

from meshtrain.models.adapters import is_adapter_parameter
from meshtrain.models.build import stock_like
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.weights.load import load_shards
from meshtrain.parallel.pipeline import Pipeline


def load_pretrained(pipeline: Pipeline, source: Path, *, enlarge_vocabulary: bool = False) -> None:
    """Fill parameters and buffers of a pipeline from a local Hugging Face directory. Collective.

    Args:
        pipeline: with memory for its parameters, on any mesh. The parameters of LoRA adapters are
            not changed.
        source: a directory with safetensors files, in any layout that transformers'
            `from_pretrained` reads.
        enlarge_vocabulary: set new rows of embedding and head to the mean of the rows in the files.

    Raises:
        ModelError: on all ranks, with the same message, if files are missing or broken, or hold
            another model.
    """
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    buffers = dict(pipeline.saved_buffers())
    load_shards(
        {**_stock_parameters(pipeline), **buffers},
        source,
        fused=[entry for entry in pipeline.fused if not is_adapter_parameter(entry.name)],
        stock=stock_like(pipeline.stages[0].model),
        enlarge_vocabulary=enlarge_vocabulary,
    )
    for name, buffer in pipeline.saved_buffers():
        # A buffer outside of the layers is on every stage, so several buffers may share a name.
        buffer.copy_(buffers[name])


def _stock_parameters(pipeline: Pipeline) -> dict[str, nn.Parameter]:
    return {name: value for name, value in pipeline.named_parameters() if not is_adapter_parameter(name)}
