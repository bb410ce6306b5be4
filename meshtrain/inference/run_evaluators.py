"""What a run evaluates between steps, beside its loss: downstream tasks, and generated texts."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig

from meshtrain import console
from meshtrain.config.evaluation import GenerateConfig, TasksConfig
from meshtrain.config.run import RunConfig
from meshtrain.inference.evaluation import Tasks
from meshtrain.inference.generation import generate_on_mesh
from meshtrain.inference.prompts import encode, write_texts
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.evaluators import Evaluation, Evaluator


def evaluators_of(config: RunConfig) -> list[Evaluator]:
    """Return what a run evaluates between steps.

    Raises:
        ConfigError: for a task that does not exist.
    """
    found: list[Evaluator] = []
    if config.tasks.names:
        found.append(TaskEvaluator(config.tasks))
    if config.generate.prompts:
        found.append(TextEvaluator(config.generate, config.seed))
    return found


class TaskEvaluator:
    """Evaluates downstream tasks.

    Args:
        config: of the run.

    Raises:
        ConfigError: for a task that does not exist.
    """

    def __init__(self, config: TasksConfig) -> None:
        self.every = config.every
        self._tasks = Tasks(
            tuple(config.names),
            None if config.folder is None else Path(config.folder),
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            batch_size=config.batch_size,
        )
        self._tasks.check()

    def check(self, config: PretrainedConfig, tokenizer: Path) -> None:
        """Check nothing more: which tasks there are does not depend on the model."""

    def evaluate(self, pipeline: Pipeline, tokenizer: Path) -> Evaluation:
        """Return the scores, under `tasks/NAME/METRIC`."""
        scores = self._tasks.evaluate(pipeline, AutoTokenizer.from_pretrained(tokenizer))
        metrics = {f"tasks/{task}/{name}": value for task, found in scores.items() for name, value in found.items()}
        shown = {name.removeprefix("tasks/"): value for name, value in metrics.items() if "_stderr" not in name}
        console.line(f"Scores: {', '.join(f'{name} {value:.4f}' for name, value in shown.items())}")
        return Evaluation(metrics)


class TextEvaluator:
    """Continues the prompts of a run.

    Args:
        config: of the run.
        seed: of the draws.
    """

    def __init__(self, config: GenerateConfig, seed: int) -> None:
        self.every = config.every
        self._config, self._seed = config, seed

    def check(self, config: PretrainedConfig, tokenizer: Path) -> None:
        """Check that the prompts have tokens, and that the model has positions for the texts."""
        self._encode(AutoTokenizer.from_pretrained(tokenizer), config, tokenizer)

    def evaluate(self, pipeline: Pipeline, tokenizer: Path) -> Evaluation:
        """Return the texts, as the note `generated`: a list of prompts and texts."""
        config = self._config
        options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": config.temperature > 0}
        if config.temperature > 0:
            options |= {"temperature": config.temperature, "top_k": 0}
        known, device = AutoTokenizer.from_pretrained(tokenizer), torch.device(pipeline.mesh.device_type)
        batch = self._encode(known, pipeline.stages[0].model.config, tokenizer)
        texts = write_texts(known, partial(generate_on_mesh, pipeline), batch, options, device, self._seed)
        for text in texts:
            console.line(f"Generated: {text}")
        pairs = zip(config.prompts, texts, strict=True)
        return Evaluation(note={"generated": [{"prompt": prompt, "text": text} for prompt, text in pairs]})

    def _encode(self, tokenizer: Any, model: PretrainedConfig, directory: Path) -> dict[str, Tensor]:
        config = self._config
        return encode(tokenizer, config.prompts, str(directory), model, config.max_new_tokens)
