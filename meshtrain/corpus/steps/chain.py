"""The chain: the steps that a corpus file names, with the settings and passes of each step."""

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
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.data.text.content_hashes import content_hashes
from meshtrain.data.text.sources import SourceFile, find_files

VERSION = 2
"""Increases when the same settings and documents begin to give another result."""

NO_EFFECT_ON_RESULT = {"user_agent", "concurrent", "concurrent_per_host"}
"""Settings of a step that do not change its result."""


def build_chain(config: CorpusConfig) -> list[Step]:
    """Return the steps of a corpus file, in order.

    Raises:
        DataError: if sources, or files that the settings name, are missing or cannot be used.
    """
    if config.urls is not None:
        load_rules(config.urls.blacklisted_domains, config.urls.blacklisted_extensions)
    if config.clean is not None:
        check_cleaning(config.clean)
    cache = Cache(Path(config.directory) / ".cache")
    files = find_files(config.sources, key="sources") if config.urls is None else _lists(config)
    steps: list[Step] = []
    source_identity = compute_identity(list(zip(_relative(files), content_hashes(files, cache), strict=True)))
    source: StepDirectory | None = None
    for name, directory in step_directories(config):
        settings = {"version": VERSION, "input": source_identity, **_settings(config, name)}
        passes = partial(_passes, config, name, files, source or directory, directory)
        steps.append(Step(name, directory, settings, passes, () if source else tuple(files)))
        source_identity = compute_identity(settings)
        source = directory
    return steps


def _relative(files: list[SourceFile]) -> list[str]:
    root = os.path.commonpath([file.path.parent for file in files])
    return [os.path.relpath(file.path, root) for file in files]


def _lists(config: CorpusConfig) -> list[SourceFile]:
    assert config.urls is not None
    return find_files(config.urls.lists, key="urls.lists")


def _settings(config: CorpusConfig, name: str) -> dict[str, Any]:
    """Return the settings that the result of a step depends on."""
    settings: dict[str, Any] = {"compression": config.compression, "shard_megabytes": config.shard_megabytes}
    if name == READ:
        return {**settings, "text_key": config.text_key, "on_bad_record": config.on_bad_record}
    own = getattr(config, name).model_dump(exclude=NO_EFFECT_ON_RESULT)
    if name == "urls":
        own |= {"lists": None, "shards": config.download.shards if config.download else None}
    for key in ("blacklisted_domains", "blacklisted_extensions", "tokenizer"):
        if own.get(key) is not None:
            own[key] = _content_identity(own[key])
    return settings | own


def _content_identity(path: str) -> str:
    """Return the identity of a file's content, because a file may change while its path stays."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    return compute_identity(file.read_text(errors="backslashreplace"))


def _passes(
    config: CorpusConfig, name: str, files: list[SourceFile], source: StepDirectory, target: StepDirectory
) -> list[ShardPass]:
    read, kept, dropped, work = source.path, target.path, target.dropped, target.work
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
            return shuffling_passes(read, kept, work, config, shuffle=config.shuffle, num_bytes=num_bytes)
        case _:
            assert config.split is not None
            return split_passes(read, kept, config.split, compression)
