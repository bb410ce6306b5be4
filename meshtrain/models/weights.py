"""Pretrained weights: every process reads only its own slices of the safetensors files."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshtrain.errors import ModelError, name_some
from meshtrain.models.fused import FusedParameter
from meshtrain.models.layout import local_ranges, local_tensor
from meshtrain.runtime.agreement import gather_objects

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
# Old files hold what the model computes by itself: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


@torch.no_grad()
def load_weights(
    parameters: Mapping[str, Tensor],
    source: Path,
    *,
    fused: Sequence[FusedParameter],
    tied: Mapping[str, str],
    base_prefix: str,
) -> None:
    """Fill this rank's parameters from the safetensors files of a Hugging Face directory. Collective.

    Args:
        parameters: our FQN -> what lies on this rank, plain or DTensor on any mesh; values are cast to its dtype. The
            ranks together hold the whole model.
        source: a local directory with model.safetensors, or with an index and the files that it names.
        fused: which stock parameters are kept in parts.
        tied: FQN of a tied head -> the FQN whose values it has.
        base_prefix: the stock model's `base_model_prefix`: files of the bare model leave it out of every name.

    Raises:
        ModelError: the same on all ranks: files are missing or broken, or they hold another model.
    """
    origins = _find_origins(parameters, fused, tied)
    with ExitStack() as stack:
        survey = _Survey()
        try:
            files = _Files(source, stack, base_prefix)
            names = {name: files.name_of(origin.name) for name, origin in origins.items()}
            survey = _survey(parameters, origins, names, files)
        except ModelError as error:
            survey.unreadable.extend(error.problems)
        surveys = gather_objects(survey)
        _check_surveys(source, surveys, files.names if not survey.unreadable else (), {*tied})
        for name, parameter in parameters.items():
            local = local_tensor(parameter)
            if local.numel():
                origin = origins[name]
                blocks = [files.read(names[name], ranges) for ranges in origin.blocks(parameter)]
                local.copy_(torch.stack(blocks, origin.dim) if origin.stacked else blocks[0])


@dataclass(frozen=True)
class _Origin:
    """Where a parameter of ours lies in the stock model: a whole stock parameter, a part of one, or a stack of parts.

    Attributes:
        name: of the stock parameter.
        dim: along which it has parts.
        start: where our part begins along `dim`.
        total: length of the stock parameter along it; None where ours is the whole.
        stacked: number of equal parts that we keep on a dimension of their own; else 0.
    """

    name: str
    dim: int = 0
    start: int = 0
    total: int | None = None
    stacked: int = 0

    def shape(self, parameter: Tensor) -> list[int]:
        sizes = list(parameter.shape)
        if self.stacked:
            sizes[self.dim : self.dim + 2] = [sizes[self.dim] * sizes[self.dim + 1]]
        elif self.total is not None:
            sizes[self.dim] = self.total
        return sizes

    def blocks(self, parameter: Tensor) -> list[list[slice]]:
        """Return the ranges of the stock tensor that make up what lies here: one, or one for each part of a stack."""
        ranges = local_ranges(parameter)
        if self.stacked:
            rows, place, length = ranges[self.dim], ranges[self.dim + 1], parameter.shape[self.dim + 1]
            shifted = [
                slice(part * length + place.start, part * length + place.stop) for part in range(rows.start, rows.stop)
            ]
            return [[*ranges[: self.dim], rows, *ranges[self.dim + 2 :]] for rows in shifted]
        if self.total is not None:
            place = ranges[self.dim]
            ranges[self.dim] = slice(self.start + place.start, self.start + place.stop)
        return [ranges]


@dataclass
class _Survey:
    """What one rank found before it reads anything."""

    unreadable: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)


class _Files:
    """The tensors of a directory, by the name that they have there."""

    def __init__(self, source: Path, stack: ExitStack, base_prefix: str) -> None:
        self._stack = stack
        self._handles: dict[Path, Any] = {}
        self._paths = self._find_paths(source)
        prefix = f"{base_prefix}."
        self._left_out = "" if any(name.startswith(prefix) for name in self._paths) else prefix

    @property
    def names(self) -> Iterable[str]:
        return self._paths.keys()

    def name_of(self, stock_name: str) -> str:
        """Return the name that a stock parameter has in these files, whether it is there or not."""
        return stock_name.removeprefix(self._left_out)

    def shape(self, name: str) -> list[int]:
        return list(self._slice(name).get_shape())

    def read(self, name: str, ranges: list[slice]) -> Tensor:
        block: Tensor = self._slice(name)[tuple(ranges)] if ranges else self._open(self._paths[name]).get_tensor(name)
        return block

    def _slice(self, name: str) -> Any:
        path = self._paths[name]
        try:
            return self._open(path).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{path} lacks {name}, which its index promises; download the model again") from error

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read ({error}): is it cut short? Download it again") from error
        return self._handles[path]

    def _find_paths(self, source: Path) -> dict[str, Path]:
        if not source.is_dir():
            raise ModelError(f"{source} is no directory; give a local Hugging Face directory with {SINGLE_NAME}")
        if (source / INDEX_NAME).is_file():
            return _read_index(source / INDEX_NAME)
        path = source / SINGLE_NAME
        if path.is_file():
            return dict.fromkeys(self._open(path).keys(), path)
        if any(source.glob("pytorch_model*.bin")):
            raise ModelError(
                f"{source} has its weights in pytorch_model.bin, a pickle; convert it: "
                f'AutoModelForCausalLM.from_pretrained("{source}").save_pretrained(...)'
            )
        raise ModelError(
            f"{source} has neither {SINGLE_NAME} nor {INDEX_NAME}; give a directory that holds the weights"
        )


def _read_index(index: Path) -> dict[str, Path]:
    try:
        paths = {name: index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of safetensors files ({error}); download the model again") from error
    if absent := sorted({path.name for path in paths.values() if not path.is_file()}):
        raise ModelError(f"{index} names files that are not there: {name_some(absent)}; download the model again")
    return paths


def _find_origins(
    parameters: Mapping[str, Tensor], fused: Sequence[FusedParameter], tied: Mapping[str, str]
) -> dict[str, _Origin]:
    parts = {part: (entry, index) for entry in fused for index, part in enumerate(entry.parts)}
    origins = {}
    for name, parameter in parameters.items():
        if name in parts:
            entry, index = parts[name]
            origins[name] = _origin_of_part(entry, index, parameter)
        else:
            origins[name] = _Origin(tied.get(name, name))
    return origins


def _origin_of_part(entry: FusedParameter, index: int, parameter: Tensor) -> _Origin:
    if entry.stacked:
        return _Origin(entry.name, entry.dim, stacked=entry.stacked)
    sizes = entry.sizes or (parameter.shape[entry.dim],) * len(entry.parts)
    return _Origin(entry.name, entry.dim, sum(sizes[:index]), sum(sizes))


def _survey(
    parameters: Mapping[str, Tensor], origins: Mapping[str, _Origin], names: Mapping[str, str], files: _Files
) -> _Survey:
    survey = _Survey(used=sorted(set(names.values())))
    present = set(files.names)
    for name, parameter in parameters.items():
        if names[name] not in present:
            survey.missing.append(origins[name].name)
            continue
        found, wanted = files.shape(names[name]), origins[name].shape(parameter)
        if found != wanted:
            survey.shapes.append(f"{origins[name].name} {tuple(found)} there, {tuple(wanted)} in the model")
    return survey


def _check_surveys(source: Path, surveys: Sequence[_Survey], names: Iterable[str], tied_heads: set[str]) -> None:
    if unreadable := dict.fromkeys(problem for survey in surveys for problem in survey.unreadable):
        raise ModelError(unreadable)
    used = {name for survey in surveys for name in survey.used}
    findings = {
        "lacks weights of the model": [name for survey in surveys for name in survey.missing],
        "holds weights that the model does not have": [
            name for name in names if name not in used | tied_heads and not _BUFFERS.search(name)
        ],
        "has weights of other shapes": [text for survey in surveys for text in survey.shapes],
    }
    problems = []
    for what, found in findings.items():
        if unique := list(dict.fromkeys(found)):
            problems.append(f"{source} {what} ({len(unique)}): {name_some(unique)}")
    if problems:
        raise ModelError([*problems, "use the configuration that belongs to these weights, or other weights"])
