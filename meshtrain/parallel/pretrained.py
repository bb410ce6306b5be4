"""Load pretrained weights into the shards of a pipeline."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from meshtrain.models.adapters import is_adapter_parameter
from meshtrain.models.build import stock_like
from meshtrain.models.initialize import restore_buffers
from meshtrain.models.packed import packed_projections
from meshtrain.models.weights.load import load_shards
from meshtrain.parallel.packing import make_packing, packed_layers
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import gather_objects


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
    load = partial(
        load_shards,
        source=source,
        fused=[entry for entry in pipeline.fused if not is_adapter_parameter(entry.name)],
        stock=stock_like(pipeline.stages[0].model),
        enlarge_vocabulary=enlarge_vocabulary,
    )
    load({**_stock_parameters(pipeline), **buffers})
    if pipeline.packs_base:
        _load_packed(pipeline, load)
    for name, buffer in pipeline.saved_buffers():
        # A buffer outside of the layers is on every stage, so several buffers may share a name.
        buffer.copy_(buffers[name])


def _load_packed(pipeline: Pipeline, load: Callable[[dict[str, Tensor]], None]) -> None:
    groups = list(packed_layers(pipeline))
    # All processes read equally often, because they report what is wrong together.
    for index in range(max(gather_objects(len(groups)))):
        members = [make_packing(*it) for it in groups[index]] if index < len(groups) else []
        load({it.name: it.weight for it in members})
        for it in members:
            it.finish()


def _stock_parameters(pipeline: Pipeline) -> dict[str, nn.Parameter]:
    packed = {name for stage in pipeline.stages for name, _ in packed_projections(stage.model)}
    parameters = dict(pipeline.named_parameters())
    return {name: it for name, it in parameters.items() if not is_adapter_parameter(name) and name not in packed}
