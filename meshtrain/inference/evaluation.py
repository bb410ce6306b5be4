"""Evaluate a model on downstream tasks, on the mesh that it is distributed over."""

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import console
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.problems import nearest
from meshtrain.errors import ConfigError
from meshtrain.inference.loading import find_model_source, pipeline_from
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.randomness import get_random_states, set_random_states
from meshtrain.runtime.agreement import gather_objects, is_first_rank
from meshtrain.runtime.environment import world_size_from_environment
from meshtrain.runtime.process import check_devices, process_group

# Resamples for the standard errors of some metrics, as in the harness.
BOOTSTRAPS = 100_000


@dataclass(frozen=True)
class Tasks:
    """Tasks of lm-evaluation-harness.

    Attributes:
        names: of tasks or groups of them.
        folder: with further tasks, as YAML files; None: only those of the harness.
        num_fewshot: number of examples in a prompt; None: as the task says.
        limit: number of documents of each task; None: all.
        batch_size: number of requests that a data-parallel rank answers at once.
    """

    names: tuple[str, ...]
    folder: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 8

    def check(self) -> None:
        """Check that the tasks exist.

        Raises:
            ConfigError: if lm_eval is not installed, there is no such folder, or no such task.
        """
        if find_spec("lm_eval") is None:
            raise ConfigError("tasks need lm_eval, which is not installed", "pip install meshtrain[evaluate]")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}, the folder of tasks, is not a directory", "pass one with YAML files")
        known = self.manager().all_tasks
        for name in self.names:
            if name not in known:
                near = nearest(name, known)
                advice = "`lm_eval ls tasks` shows all of them" if near is None else f"did you mean {near!r}?"
                raise ConfigError(f"there is no task {name!r}", advice)

    def evaluate(self, pipeline: Pipeline, tokenizer: Any) -> dict[str, dict[str, float]]:
        """Evaluate a model. Collective.

        Args:
            pipeline: with values.
            tokenizer: of transformers.

        Returns:
            Task -> metric, by its name in the harness (such as `acc` or `acc_stderr`) -> number.
        """
        from lm_eval.evaluator import simple_evaluate  # noqa: PLC0415 - an optional package

        from meshtrain.inference.harness import MeshModel, harness_quiet  # noqa: PLC0415 - needs that package

        with _random_states_kept(), harness_quiet(shows_progress=is_first_rank()):
            found: Mapping[str, Any] | None = simple_evaluate(
                MeshModel(pipeline, tokenizer, self.batch_size),
                tasks=list(self.names),
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                task_manager=self.manager(),
                log_samples=False,
                # Some standard errors need processes of their own, and are shown by one rank.
                bootstrap_iters=BOOTSTRAPS if is_first_rank() else 0,
            )
        # Only the first process of each host gets the scores.
        return gather_objects({} if found is None else _numbers(found["results"]))[0]

    def manager(self) -> Any:
        """Return the harness's object that knows the tasks."""
        return _manager(self.names, self.folder)


@functools.cache
def _manager(names: tuple[str, ...], folder: Path | None) -> Any:
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 - an optional package

    if folder is not None:
        # The harness has some ten thousand tasks, and reads all of their files.
        own = TaskManager(include_path=str(folder), include_defaults=False)
        if {*names} <= {*own.all_tasks}:
            return own
    return TaskManager(include_path=None if folder is None else str(folder))


def evaluate_tasks(source: str, tasks: Tasks, plan: ParallelPlan | None = None, out: Path | None = None) -> None:
    """Evaluate a model on disk, and print its scores. Collective over torchrun's processes.

    Args:
        source: a checkpoint, a run directory, of which the newest checkpoint is used, or a Hugging
            Face folder; may be a URL.
        tasks: of the harness.
        plan: how the model is laid out on the processes; None: there is one process.
        out: receives the scores as JSON.

    Raises:
        ConfigError: for unknown tasks, or several processes without a plan.
        UserError: as `meshtrain generate`, for the model and the plan.
    """
    tasks.check()
    world_size = world_size_from_environment()
    if plan is None and world_size > 1:
        raise ConfigError(
            f"{world_size} processes are started, but there is no plan for them",
            f"add mesh.tp={world_size} (or mesh.dp_shard={world_size}), or --plan FILE, or start one process",
        )
    check_devices()
    with ExitStack() as stack:
        found = find_model_source(source, stack)
        tokenizer, config = found.tokenizer(), found.config()
        device = stack.enter_context(process_group())
        pipeline = pipeline_from(found, config, plan or ParallelPlan(), device)
        scores = tasks.evaluate(pipeline, tokenizer)
        if is_first_rank():
            _show(scores)
            if out is not None:
                out.write_text(json.dumps(scores, indent=2) + "\n")


def _show(scores: Mapping[str, Mapping[str, float]]) -> None:
    rows: list[Sequence[str]] = []
    for task, metrics in scores.items():
        for name, value in metrics.items():
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr")
                rows.append((task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}"))
    console.table("Scores", ("task", "metric", "value", "standard error"), rows)


def _numbers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the numbers among results, by names without that of the filter that does nothing."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in scores.items()
            if isinstance(value, int | float) and name != "sample_len"
        }
        for task, scores in results.items()
    }


@contextmanager
def _random_states_kept() -> Iterator[None]:
    # The harness seeds all generators.
    states, of_python, of_numpy = get_random_states(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        set_random_states(states)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
