"""The sources of a run: each stands for files of text, URLs that are streamed, or tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config.data import DataConfig, MixedSourceConfig
from meshtrain.data.text.sources import SourceFile, find_files, find_streamed_files
from meshtrain.data.tokens.tokenized_source import is_tokenized
from meshtrain.errors import DataError, Problem

Part = str | list[SourceFile]
"""One part of a source: the path of its tokens, or the files of its text."""


@dataclass(frozen=True)
class FoundSource:
    """A source of a run file, with the files that it stands for."""

    name: str
    config: MixedSourceConfig
    train: Part
    validation: Part


def find_sources(config: DataConfig) -> list[FoundSource]:
    """Find the files of every source of a run.

    Raises:
        DataError: with every source that matches no file, or files that cannot be used.
    """
    problems: list[str | Problem] = []
    found = []
    for name, source in config.named_sources.items():
        validation = source.validation if isinstance(source.validation, list) else []
        parts: dict[str, Part] = {}
        for part, names in (("train", source.train), ("validation", validation)):
            try:
                key = config.key_of(name, part)
                is_streamed = source.streaming and part == "train"
                parts[part] = find_streamed_files(names, key=key) if is_streamed else _find_part(names, key)
            except DataError as error:
                problems += error.problems
        if isinstance(parts.get("train"), str) and isinstance(source.validation, float) and source.validation:
            problems.append(
                f"{config.key_of(name, 'validation')} = {source.validation}: documents of tokenized data cannot be "
                "held out; tokenize with meshtrain tokenize --validation, and name what it wrote"
            )
        if isinstance(parts.get("train"), str) and source.weight_key is not None:
            problems.append(
                f"{config.key_of(name, 'weight_key')}: {source.train[0]} is tokenized already, and its records are "
                "gone; name the text, or leave it out"
            )
        if source.is_of_answers:
            problems += [
                f"{config.key_of(name, part)}: {where} is tokenized already, and {config.key_of(name, 'format')} = "
                f'"{source.format}" is for records: name the files with them'
                for part, where in parts.items()
                if isinstance(where, str)
            ]
        found.append(FoundSource(name, source, parts.get("train", []), parts.get("validation", [])))
    if problems:
        raise DataError(problems)
    _check_validation_is_separate(config, found)
    return found


def _find_part(names: list[str], key: str) -> Part:
    tokens = [name for name in names if is_tokenized(name)]
    if not tokens:
        return find_files(names, key=key)
    if len(names) > 1:
        raise DataError(
            f"{key}: {tokens[0]} is tokenized already, but is listed with others ({len(names) - 1} more)",
            "give each its own source (data.sources.NAME)",
        )
    return tokens[0]


def _paths(part: Part) -> set[Path]:
    return {Path(part)} if isinstance(part, str) else {file.path for file in part}


def _check_validation_is_separate(config: DataConfig, found: Iterable[FoundSource]) -> None:
    trained_on = {path: source.name for source in found for path in _paths(source.train)}
    for source in found:
        if shared := _paths(source.validation) & trained_on.keys():
            file = min(shared)
            raise DataError(
                f"{config.key_of(source.name, 'validation')}: {file} is also in "
                f"{config.key_of(trained_on[file], 'train')}, so a low loss on it means nothing",
                f"leave it out of one of them, or hold documents out with {config.key_of(source.name, 'validation')} "
                "= 0.05",
            )
