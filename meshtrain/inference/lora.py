"""Export a checkpoint of LoRA adapters: in the files of peft, or merged into the model."""

from contextlib import ExitStack
from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint.huggingface.adapters import save_adapters
from meshtrain.checkpoint.huggingface.export import ORIGINAL, export_checkpoint
from meshtrain.checkpoint.huggingface.layout import FLOATS
from meshtrain.checkpoint.huggingface.pretrained import write_pretrained
from meshtrain.checkpoint.manifest import read_manifest
from meshtrain.checkpoint.storage.directory import find_checkpoint
from meshtrain.checkpoint.storage.location import open_location
from meshtrain.checkpoint.storage.named_folder import check_new
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import CheckpointError
from meshtrain.inference.loading import ModelSource, find_model_source, pipeline_from
from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import dtype_name
from meshtrain.models.lora import adapted_model
from meshtrain.models.saved_modules import shortest_targets
from meshtrain.runtime.process import check_devices, process_group


def export(
    checkpoint: str, folder: Path, *, dtype: str = ORIGINAL, merge_adapters: bool = False, ema: bool = False
) -> None:
    """Write a checkpoint as `export_checkpoint` does, or its adapters if it holds these alone.

    Args:
        checkpoint: a step-N directory, or a run directory, whose newest checkpoint is taken; may be
            a URL.
        folder: receives the model, or the adapters in the files of peft. It appears when it is
            complete.
        dtype: number format of the weights, as for `export_checkpoint`.
        merge_adapters: whether the full model is written, with the adapters added to its weights.
            Needs memory for the model.
        ema: whether the average of the weights is written, as for `export_checkpoint`.

    Raises:
        CheckpointError: as `export_checkpoint`; if there are no adapters to merge, or their base
            has changed.
        ModelError: if the base is gone.
    """
    location = open_location(checkpoint)
    if read_manifest(find_checkpoint(location)).base is not None:
        if ema:
            raise CheckpointError(f"--ema: {checkpoint} holds adapters, which have no average", "leave it out")
        _export_adapters(checkpoint, folder, dtype, merges=merge_adapters)
        return
    if merge_adapters:
        raise CheckpointError(f"--merge-adapters: {checkpoint} holds a full model, and no adapters", "leave it out")
    export_checkpoint(location, folder, dtype=dtype, ema=ema)


def _export_adapters(checkpoint: str, folder: Path, dtype: str, *, merges: bool) -> None:
    if dtype != ORIGINAL and not merges:
        raise CheckpointError(
            f"--dtype {dtype} is for a full model, but adapters keep theirs", "leave it out, or add --merge-adapters"
        )
    check_new(folder)
    check_devices()
    with ExitStack() as stack:
        source = find_model_source(checkpoint, stack)
        assert source.manifest is not None
        device = stack.enter_context(process_group())
        pipeline = pipeline_from(source, source.config(), ParallelPlan(), device, with_base=merges, computes=False)
        if merges:
            original = dtype_name(source.config().dtype or FLOATS[source.manifest.dtype])
            chosen = FLOATS[original if dtype == ORIGINAL else dtype]
            write_pretrained(pipeline, folder, dtype=chosen, tokenizer=source.directory)
            return
        save_adapters(_peft_model(source), pipeline, folder, tokenizer=source.directory)
    console.line(f"{folder} holds the adapters of step {source.manifest.step:,}, for peft")


def _peft_model(source: ModelSource) -> object:
    """Return the model whose configuration is written beside the adapters."""
    assert source.manifest is not None
    assert source.manifest.base is not None
    model = build_meta_model(source.config(), dtype=FLOATS[source.manifest.dtype], attention=None)
    lora = source.manifest.base.lora
    found = adapted_model(model, lora, shortest_targets(model, lora.modules_to_save))
    found.peft_config["default"].base_model_name_or_path = source.manifest.base.path
    return found
