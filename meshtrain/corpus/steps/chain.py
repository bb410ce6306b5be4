"""The chain: the steps that a corpus file names, what decides their results, and the stages that they consist of."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from meshtrain.config.corpus import CorpusConfig
from meshtrain.corpus.duplicates.deduplication import deduplication_passes
from meshtrain.corpus.steps.blocks import ShardPass
from meshtrain.corpus.steps.clean import check_cleaning, cleaning_passes
from meshtrain.corpus.steps.reading import reading_passes
from meshtrain.corpus.steps.shuffle import shuffling_passes, split_passes
from meshtrain.corpus.steps.step import READ, Step, StepDirectory, step_directories
from meshtrain.corpus.web.download import download_passes
from meshtrain.corpus.web.link_rules import load_rules
from meshtrain.corpus.web.urls import link_passes
from meshtrain.data.cache import Cache, identity_of
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.sources import SourceFile, find_files

VERSION = 2
"""Counts the ways in which the same words have made the same documents into something else."""

NO_EFFECT_ON_RESULT = {"user_agent", "concurrent", "concurrent_per_host"}
"""Words of a step that do not decide its result."""


def build_chain(config: CorpusConfig) -> list[Step]:
    """Return the steps of a corpus file, in order.

    Raises:
        DataError: if sources or files that the words name are missing, or cannot be used.
    """
    if config.urls is not None:
        load_rules(config.urls.blacklisted_domains, config.urls.blacklisted_extensions)
    if config.clean is not None:
        check_cleaning(config.clean)
    directory = Path(config.directory)
    files = find_files(config.sources, key="sources") if config.urls is None else _lists(config)
    steps: list[Step] = []
    read = identity_of(list(zip(_relative(files), content_hashes(files, Cache(directory / ".cache")), strict=True)))
    source: StepDirectory | None = None
    for name, place in step_directories(config):
        words = {"version": VERSION, "input": read, **_words(config, name)}
        stages = partial(_stages, config, name, files, source or place, place)
        steps.append(Step(name, place, words, stages, () if source else tuple(files)))
        read = identity_of(words)
        source = place
    return steps


def _relative(files: list[SourceFile]) -> list[str]:
    root = os.path.commonpath([file.path.parent for file in files])
    return [os.path.relpath(file.path, root) for file in files]


def _lists(config: CorpusConfig) -> list[SourceFile]:
    assert config.urls is not None
    return find_files(config.urls.lists, key="urls.lists")


def _words(config: CorpusConfig, name: str) -> dict[str, Any]:
    """Return what decides the result of a step."""
    words: dict[str, Any] = {"compression": config.compression, "shard_megabytes": config.shard_megabytes}
    if name == READ:
        return {**words, "text_key": config.text_key, "on_bad_record": config.on_bad_record}
    own = getattr(config, name).model_dump(exclude=NO_EFFECT_ON_RESULT)
    if name == "urls":
        own |= {"lists": None, "shards": config.download.shards if config.download else None}
    for key in ("blacklisted_domains", "blacklisted_extensions", "tokenizer"):
        if own.get(key) is not None:
            own[key] = _content(own[key])
    return words | own


def _content(path: str) -> str:
    """Name a file by what it says: it may change while its name stays."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    return identity_of(file.read_text(errors="backslashreplace"))


def _stages(
    config: CorpusConfig, name: str, files: list[SourceFile], source: StepDirectory, place: StepDirectory
) -> list[ShardPass]:
    read, kept, dropped, work = source.directory, place.directory, place.dropped, place.work
    compression = config.compression
    num_bytes = counts.num_bytes if (counts := source.counts()) else 0
    match name:
        case "read":
            return reading_passes(files, kept, dropped, config)
        case "urls":
            return link_passes(files, kept, dropped, work, config)
        case "download":
            assert config.download is not None
            return download_passes(
                read, kept, dropped, work, config.download, compression=compression, workers=config.workers
            )
        case "clean":
            assert config.clean is not None
            return cleaning_passes(read, kept, dropped, config.clean, compression)
        case "deduplicate":
            assert config.deduplicate is not None
            tasks = len(source.shards())
            return deduplication_passes(read, kept, dropped, work, config.deduplicate, tasks)
        case "shuffle":
            assert config.shuffle is not None
            return shuffling_passes(read, kept, work, config, seed=config.shuffle, num_bytes=num_bytes)
        case _:
            assert config.split is not None
            return split_passes(read, kept, config.split, compression)
