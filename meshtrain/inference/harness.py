"""Downstream tasks of lm-evaluation-harness, answered by a model that is distributed over a mesh.

The harness builds the requests and computes the scores, as it does for a model of transformers.
Here are the two things that it asks of a model: logits, and generated tokens. lm_eval is optional.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from meshtrain.inference.generation import generate_on_mesh, logits_on_mesh
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.mesh import data_rank

Answer = TypeVar("Answer")


class MeshModel(HFLM):
    """A model of the harness whose forward passes run on all processes.

    Every process asks the same requests. Data-parallel ranks answer a part of them each.

    Args:
        pipeline: with values.
        tokenizer: of transformers.
        batch_size: number of requests that a data-parallel rank answers at once.
    """

    def __init__(self, pipeline: Pipeline, tokenizer: Any, batch_size: int) -> None:
        with harness_quiet():
            # With the cache, the number of forward passes depends on the texts.
            super().__init__(_Answering(pipeline), tokenizer=tokenizer, batch_size=batch_size, logits_cache=False)
        self._pipeline = pipeline

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        answer = super()._loglikelihood_tokens
        size = None if override_bs is None else self.batch_size
        return self._shared(requests, lambda own: answer(own, disable_tqdm=True, override_bs=size))

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return the texts that follow the prompts of requests."""
        answer = super().generate_until
        # Requests with other options are never answered in one batch.
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(index)
        found: dict[int, str] = {}
        for indices in alike.values():
            chosen = [requests[index] for index in indices]
            texts = self._shared(chosen, lambda own: answer(own, disable_tqdm=True))
            found |= dict(zip(indices, texts, strict=True))
        return [found[index] for index in range(len(requests))]

    def _shared(self, requests: Sequence[Any], answer: Callable[[Sequence[Any]], Sequence[Answer]]) -> list[Answer]:
        """Return the answers to all requests, of which each data-parallel rank gives a part."""
        number = self._pipeline.plan.mesh.data_degree
        if not requests:
            return []
        # FSDP2 gathers parameters in every forward pass, so all ranks must run equally many.
        padded = [*requests, *[requests[0]] * (-len(requests) % number)]
        rank = data_rank(self._pipeline.mesh)
        answers = dict(gather_objects((rank, list(answer(padded[rank::number])))))
        return [answers[index % number][index // number] for index in range(len(requests))]


class _Answering:
    """What the harness reads and calls of a model of transformers."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.config = pipeline.stages[0].model.config
        self.device = torch.device(pipeline.mesh.device_type)

    def __call__(self, input_ids: Tensor) -> CausalLMOutput:
        # Each batch has the time of an evaluation: a run may have many.
        self._pipeline.activity.begin("evaluation")
        return CausalLMOutput(logits=logits_on_mesh(self._pipeline, input_ids))

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        """Continue prompts, as the harness asks it."""
        self._pipeline.activity.begin("evaluation")
        return generate_on_mesh(self._pipeline, input_ids, **options)


@contextmanager
def harness_quiet(*, shows_progress: bool = True) -> Iterator[None]:
    """Hide what the harness logs about models that it has not loaded itself, and what it prints.

    Args:
        shows_progress: whether its progress bars are shown.
    """
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            if not shows_progress:
                stack.enter_context(redirect_stderr(nowhere))
            yield
    finally:
        logger.setLevel(before)
