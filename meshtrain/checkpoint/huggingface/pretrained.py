"""Write the model of a pipeline as an ordinary Hugging Face folder."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain import console
from meshtrain.checkpoint.huggingface.adapters import Merging, active_adapters, find_lost_biases
from meshtrain.checkpoint.huggingface.description import Tokenizer, write_description
from meshtrain.checkpoint.huggingface.layout import FLOATS, MAX_SHARD_SIZE, check_names, layout_of, plan_files
from meshtrain.checkpoint.huggingface.mesh_export import (
    Groups,
    LiveTensors,
    find_live_tensors,
    groups_for_saving,
    write_live_folder,
)
from meshtrain.checkpoint.huggingface.stock_tensors import stock_tensors
from meshtrain.checkpoint.huggingface.whole import check_no_dtype, whole_layout, write_whole_description
from meshtrain.config.mesh import PP
from meshtrain.errors import CheckpointError
from meshtrain.models.adapters import is_adapter_parameter
from meshtrain.models.build import stock_like
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.packed import packed_projections
from meshtrain.models.whole.folder import half_of
from meshtrain.parallel.packing import unpacked
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import reshard
from meshtrain.runtime.agreement import check_alike, failing_together, is_first_rank, raise_together


def write_pretrained(
    pipeline: Pipeline,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    tokenizer: Tokenizer = None,
    origin: Path | None = None,
) -> None:
    """Write the model as a folder that stock `from_pretrained` loads. Collective.

    For the language half of a multimodal model this is the whole folder: all other tensors and
    files are copied from the one that the half came from.

    LoRA adapters are merged into the weights. The files are those of stock `save_pretrained`,
    whatever the mesh. The first process of every pipeline stage writes the tensors of that stage
    one by one, and holds one full tensor at a time. The other processes hold a copy of their own
    part of the tensor.

    Args:
        pipeline: with values.
        folder: appears when it is complete. Every machine must see the same one.
        dtype: number format of the weights. None: that of `model.config.dtype`.
        max_shard_size: of a file, in bytes or as in "5GB". A larger tensor has its own file.
        tokenizer: written beside the weights. None: the one in the directory that the model came
            from.
        origin: that directory. None: the one that the configuration names.

    Raises:
        CheckpointError: the same on all processes, if `dtype` is not a format for weights, the
            folder is not empty or cannot be written, or the tensors are not those of the model. Of
            the language half of a multimodal model also: a `dtype` is asked for, or the folder of
            the whole model is gone or has changed.
    """
    model = pipeline.stages[0].model
    chosen = dtype or original_dtype(pipeline)
    if chosen not in FLOATS.values():
        raise CheckpointError(
            f"dtype = {chosen} is not a format that weights are saved in", f"pass torch.{', torch.'.join(FLOATS)}"
        )
    stock = stock_like(model, chosen)
    with failing_together(CheckpointError):
        found = half_of(model.config)
        if found is not None:
            check_no_dtype("" if dtype is None else f"dtype = {dtype}")
        layout = layout_of(stock) if found is None else whole_layout(*found)
    plan = plan_files(layout, max_shard_size)
    folder = folder.absolute()
    with groups_for_saving() as groups:
        asked = {"dtype": dtype_name(chosen), "max_shard_size": max_shard_size, "folder": folder}
        check_alike("save_pretrained", asked, CheckpointError, groups.agreement)
        live = live_tensors(pipeline, groups)
        # All processes raise the same error, because `live.shapes` is the same on all.
        check_names("the parallel model", live.shapes, stock)
        describe = partial(write_description, model=model, tokenizer=tokenizer, dtype=chosen, origin=origin)
        if found is not None:
            describe = partial(
                write_whole_description, folder=found[1], config=model.config, tokenizer=tokenizer, origin=origin
            )
        write_live_folder(folder, layout, plan, live, describe=describe)
    if is_first_rank():
        what = f"{type(stock).__name__} in {dtype_name(chosen)}"
        if found is not None:
            what = f"{type(found[0].whole).__name__} with the trained language half"
        console.line(f"{folder} holds {what}")


def original_dtype(pipeline: Pipeline) -> torch.dtype:
    """Return the number format that the model was built or loaded in."""
    dtype = pipeline.stages[0].model.config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype or getattr(torch, pipeline.plan.precision.parameters)


def live_tensors(pipeline: Pipeline, groups: Groups) -> LiveTensors:
    """Return the tensors of a pipeline by stock name, with the adapters to merge. Collective."""
    for stage in pipeline.stages:
        # After a forward pass without a backward pass, parameters would still be gathered over
        # dp_shard.
        reshard(stage.model)
    held = owned_tensors(pipeline)
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    stock = stock_tensors(shapes, pipeline.fused)
    merging = Merging(
        active_adapters(pipeline), {name: stock.pop(name) for name in [*stock] if is_adapter_parameter(name)}
    )
    raise_together(find_lost_biases(merging.adapters, stock), CheckpointError, groups.agreement)
    return find_live_tensors(held, stock, leader_of(pipeline), groups, merging)


def owned_tensors(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return our FQN -> parameter or persistent buffer. All processes together hold all weights."""
    packed = [it for stage in pipeline.stages for it in packed_projections(stage.model)]
    full = {name: unpacked(module) for name, module in packed}
    return {**pipeline.owned_parameters(), **dict(pipeline.saved_buffers()), **full}


def leader_of(pipeline: Pipeline) -> int:
    """Return the rank that gathers the tensors of this process.

    It is the first rank with this process's coordinate on the pp axis.
    """
    ranks = pipeline.mesh.mesh[pipeline.mesh.get_local_rank(PP)]
    assert dist.get_rank() in ranks
    return int(ranks.flatten()[0])
