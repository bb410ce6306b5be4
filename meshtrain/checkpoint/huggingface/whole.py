"""Write the folder of a multimodal model back, with a trained language half.

The tensors of the half are written under the names, and in the number formats, that the folder has.
All others, such as those of the vision tower and the projector, are copied byte by byte.
"""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshtrain.checkpoint.huggingface.description import Tokenizer, save_tokenizer
from meshtrain.checkpoint.huggingface.layout import Group, HubLayout, Tensors, layout_of, saved_tensors_of
from meshtrain.errors import CheckpointError, ModelError, name_some
from meshtrain.models.weights.hub_layout import Layout, find_layout
from meshtrain.models.weights.safetensors_files import FileTensor, find_tensors
from meshtrain.models.whole.folder import whole_config_at
from meshtrain.models.whole.half import LanguageHalf, set_half_values

# Files of a folder that hold weights, in any format.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def check_no_dtype(asked: str) -> None:
    """Check that no number format is asked for.

    Args:
        asked: how the user asked for one; empty: not at all.

    Raises:
        CheckpointError: if one is asked for.
    """
    if asked:
        raise CheckpointError(
            f"{asked} is for a model that is written alone, but this one is the language half of a multimodal model, "
            "whose other tensors are copied",
            "leave it out: every tensor keeps the number format that it has in the original folder",
        )


def whole_layout(half: LanguageHalf, folder: Path) -> HubLayout:
    """Return how a folder is written back: its groups are tensors of the half, by their own names.

    Args:
        half: found in `folder`.
        folder: the one that the half came from.

    Raises:
        CheckpointError: if the folder has the half in a form that transformers reads, but does not
            write.
        ModelError: if the weights of the folder cannot be read, or some are missing.
    """
    files = find_tensors(folder)
    read = find_layout(half.whole, files)
    if read.missing:
        raise ModelError(
            f"{folder} lacks weights of the model ({len(read.missing)}): {name_some(read.missing)}",
            "use a folder that has them all",
        )
    sources, saved = _sources(half, read), saved_tensors_of(half.whole)
    formats = {name: files[found[0]].dtype for name, found in sources.items() if found and name in saved}
    written, own = layout_of(half.whole, formats), {there: name for name, there in half.names.items()}
    copies, plain, groups = dict[str, list[str]](), set[str](), list[Group]()
    for group in written.groups:
        if group.stock[0] not in own:
            continue
        stored = read.converted.isdisjoint(group.stock)
        plain |= {*group.stock} if stored else set()
        # Of a tensor that is stored as it is in the model, there may be a copy: a tied head.
        found = {name: sources[name] for name in group.stock} if stored else _paired(group, sources)
        copies |= found
        groups.append(Group(tuple(own[name] for name in group.stock), tuple(itertools.chain(*found.values()))))
    made = {**{name: saved[name].to(formats[name]) for name in plain}, **written.tensors}
    trained = {name: made[origin] for origin, names in copies.items() for name in names}
    _check_names(folder, trained, sources, files)

    def convert(full: Tensors) -> Tensors:
        state = {half.names[name]: tensor for name, tensor in full.items()}
        tensors = state if plain.issuperset(state) else written.convert(state)
        return {name: tensor for origin, tensor in tensors.items() for name in copies[origin]}

    return HubLayout(
        {name: trained[name] if name in trained else _on_meta(tensor) for name, tensor in files.items()},
        {own[name]: dtype for name, dtype in written.dtypes.items() if name in own},
        tuple(groups),
        convert,
        kept={name: tensor for name, tensor in files.items() if name not in trained},
    )


def write_whole_description(
    directory: Path, folder: Path, config: PretrainedConfig, tokenizer: Tokenizer, origin: Path | None = None
) -> None:
    """Write the files of a multimodal model beside its weights: configurations, processors, notes.

    Args:
        directory: to write into. It exists.
        folder: the one that the half came from. Its files are copied.
        config: of the half. Values that the run has changed are set in config.json.
        tokenizer: as for `save_tokenizer`.
        origin: as for `save_tokenizer`.

    Raises:
        CheckpointError: if `tokenizer` is a path without a tokenizer.
    """
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, directory / file.name)
    whole_config = whole_config_at(folder)
    assert whole_config is not None, "the folder was read before"
    if set_half_values(whole_config, config):
        whole_config.save_pretrained(directory)
    save_tokenizer(directory, tokenizer, origin or Path())


def _sources(half: LanguageHalf, read: Layout) -> dict[str, list[str]]:
    """Return name in the whole model -> names in the files, of the half, also of ends of a tie."""
    sources = {name: [*read.sources.get(name, [])] for name in half.names.values()}
    for copy, original in half.whole.all_tied_weights_keys.items():
        if original in sources:
            # A folder may have the head beside the embedding, or in place of it.
            sources[original] += read.sources.get(copy, [])
            sources.pop(copy, None)
    return sources


def _paired(group: Group, sources: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return name that transformers would write -> name in the files, of a converted group.

    The names may differ in what all of them begin with, as in old files.
    """
    files = [*dict.fromkeys(name for stock in group.stock for name in sources[stock])]
    here, there = (len(os.path.commonprefix(names)) for names in (group.hub, files))  # noqa: RUF071 - no paths
    by_rest = {name[there:]: name for name in files}
    return {name: [by_rest[name[here:]]] if name[here:] in by_rest else [name] for name in group.hub}


def _check_names(
    folder: Path,
    trained: Mapping[str, Tensor],
    sources: Mapping[str, list[str]],
    files: Mapping[str, FileTensor],
) -> None:
    """Check that every trained tensor of the files is written, in the form that it has there.

    Raises:
        CheckpointError: naming tensors for which this is not so.
    """
    others = [name for found in sources.values() for name in found if name not in trained]
    # The number of rows may differ, because a run may enlarge the vocabulary.
    others += [name for name, one in trained.items() if name not in files or files[name].shape[1:] != one.shape[1:]]
    if others:
        raise CheckpointError(
            f"{folder} has weights of the language half in a form that transformers reads, but does not write: "
            f"{name_some(list(dict.fromkeys(others)), 3)}",
            "load the folder with its stock class, and train from what its save_pretrained writes",
        )


def _on_meta(tensor: FileTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
