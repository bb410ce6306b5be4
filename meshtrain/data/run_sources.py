"""What the sources of a run file stand for: files of text, URLs that are streamed, or tokens already."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config.data import DataConfig, MixedSourceConfig
from meshtrain.data.text.sources import SourceFile, find_files, find_streamed_files
from meshtrain.data.tokens.tokenized_source import is_tokenized
from meshtrain.errors import DataError, Problem

Part = str | list[SourceFile]
"""What one part of a source is: tokens already, under this path; or the files of its text."""


@dataclass(frozen=True)
class FoundSource:
    """What the words of a source stand for."""

    name: str
    config: MixedSourceConfig
    train: Part
    validation: Part


def find_sources(config: DataConfig) -> list[FoundSource]:
    """Find what every source of a run stands for.

    Raises:
        DataError: with every source that stands for nothing, or for what it cannot be.
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
                f"{config.key_of(name, 'validation')} = {source.validation}: of tokens no documents are kept aside; "
                "tokenize with meshtrain tokenize --validation, and name what it wrote"
            )
        found.append(FoundSource(name, source, parts.get("train", []), parts.get("validation", [])))
    if problems:
        raise DataError(problems)
    _check_apart(config, found)
    return found


def _find_part(names: list[str], key: str) -> Part:
    tokens = [name for name in names if is_tokenized(name)]
    if not tokens:
        return find_files(names, key=key)
    if len(names) > 1:
        raise DataError(
            f"{key}: {tokens[0]} is tokens already, and stands beside {len(names) - 1} more; give each a source of its "
            "own (data.sources.NAME)"
        )
    return tokens[0]


def _paths(part: Part) -> set[Path]:
    return {Path(part)} if isinstance(part, str) else {file.path for file in part}


def _check_apart(config: DataConfig, found: Iterable[FoundSource]) -> None:
    trained_on = {path: source.name for source in found for path in _paths(source.train)}
    for source in found:
        if shared := _paths(source.validation) & trained_on.keys():
            file = min(shared)
            raise DataError(
                f"{config.key_of(source.name, 'validation')}: {file} is also in "
                f"{config.key_of(trained_on[file], 'train')}, where a low loss on it means nothing; leave it out of "
                f"one of them, or keep documents aside with {config.key_of(source.name, 'validation')} = 0.05"
            )
