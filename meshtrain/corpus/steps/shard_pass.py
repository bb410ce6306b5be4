"""A stage: one pass over shards of documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datatrove.pipeline.base import PipelineStep


@dataclass(frozen=True)
class ShardPass:
    """One pass over shards of documents: datatrove blocks, and how many tasks share the work.

    Stages run one after another.
    """

    name: str
    pipeline: Sequence[PipelineStep | Callable[..., Any]]
    tasks: int
