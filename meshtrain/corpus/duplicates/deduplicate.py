"""Near duplicates: MinHash candidates, an exact check, and one document of each group that stays.

The work is cut the way datatrove's own deduplication is (signatures, buckets, clusters, filter) and runs on its
executors. What is different: candidates are compared exactly, so that no document goes whose similarity is below the
threshold; and a group is the documents that are similar to the one that stays, not all that a chain connects.
"""

from pathlib import Path

from datatrove.pipeline.base import PipelineStep

from meshtrain.config.corpus import DeduplicateConfig
from meshtrain.corpus.duplicates.deduplication import (
    CompareDocuments,
    ConnectMeetings,
    FindMeetings,
    RemoveDuplicates,
    SketchDocuments,
    WriteGroups,
)
from meshtrain.corpus.duplicates.minhash import choose_bands
from meshtrain.corpus.steps.shard_pass import ShardPass


def deduplication_stages(
    source: Path, target: Path, dropped: Path, work: Path, config: DeduplicateConfig, tasks: int
) -> list[ShardPass]:
    """Return the stages that remove near duplicates; each needs the ones before it.

    What comes out depends on the documents and their order alone: not on the number of tasks or of workers.

    Args:
        source: a directory of shards; every line has the texts `text` and `id`.
        target: gets shards of the same names with the documents that stay, byte for byte.
        dropped: gets shards of the same names with those that go, and why; and `groups.jsonl`, the groups as evidence.
        work: for files in between: per document about 8 bytes for each different run of words, and 450 more.
        config: what counts as similar.
        tasks: how many tasks share the work of a stage.
    """
    bands = choose_bands(config)
    steps: list[tuple[str, PipelineStep, int]] = [
        ("sketch", SketchDocuments(source, work, bands, config.ngram), tasks),
        ("meet", FindMeetings(source, work, bands.num_bands), tasks),
        ("connect", ConnectMeetings(source, work, bands.num_bands, tasks), 1),
        ("compare", CompareDocuments(source, work, bands, config.similarity), tasks),
        ("group", WriteGroups(source, work, dropped), 1),
        ("remove", RemoveDuplicates(source, target, dropped, work), tasks),
    ]
    return [ShardPass(name, [step], num_tasks) for name, step, num_tasks in steps]
