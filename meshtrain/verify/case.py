"""What is proven: a tiny model, its plan, and the batches that both sides train on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from meshtrain.config.lora import NO_LORA, LoraConfig
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import STOCK_ROUTER, RouterConfig

Rows = Literal["joined", "separate", "padded", "bucketed"]
"""The rows of a batch. `joined`: full sequences. `separate`: sequences of several documents,
which `position_ids` keep apart. `padded`: samples that are shorter than the sequence, with an
attention mask. `bucketed`: such samples, in batches of different widths."""
STEPS, SEED = 3, 0
SEQUENCE, MICRO_BATCH_SIZE = 16, 2
# AdamW divides by sqrt(v) + epsilon: with 1e-8 the rounding noise of a zero gradient grows to
# 1e-11. A learning rate of 1e-2 makes the noise of a small gradient 20 times larger in every step.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, epsilon=1e-4, weight_decay=0.1, max_gradient_norm=0.5)
NOISE = 0.05
DOCUMENTS_PER_TOKEN = 0.2


@dataclass(frozen=True)
class ProofCase:
    """A tiny model under a plan.

    Attributes:
        architecture: class of the model.
        hf_config: of the tiny model.
        plan: resolved, in float64.
        global_batch_size: in sequences.
        rows: kind of the rows of the batches.
        pretrained: whether training starts from given weights, so that the initialization need not
            be repeatable.
        router: how routers are trained.
        objective: what training minimizes.
        lora: the adapters that train beside the model, if it has a rank.
    """

    architecture: str
    hf_config: PretrainedConfig
    plan: ParallelPlan
    global_batch_size: int
    rows: Rows
    attention: str
    trust_remote_code: bool
    pretrained: bool = False
    router: RouterConfig = STOCK_ROUTER
    objective: ObjectiveConfig = STOCK_OBJECTIVE
    lora: LoraConfig = NO_LORA

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return int(self.hf_config.get_text_config().vocab_size)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.plan.mesh.world_size

    def batches(self) -> list[dict[str, Tensor]]:
        """Return the global batches that both sides train on."""
        return make_batches(self.vocabulary, self.global_batch_size, self.rows)


@dataclass
class Trace:
    """The results of a few training steps, under the stock names.

    Attributes:
        initial: initial parameters.
        losses: of each step, without the losses of routers.
        cross_entropies: of each step, if the loss is more than that.
        z_losses: of the logits, of each step, if the loss has one.
        router_losses: auxiliary losses of each step, if there are any.
        router_z_losses: of each step, if there are any.
        norms: of each step's gradient, before clipping.
        gradients: of each step, before clipping; those of this process.
        parameters: after the last step; those of this process.
        biases: with which routers select experts, after the last step, if steps move them; those of
            this process that are buffers.
        evaluation: mean loss over the first batch, after the last step.
        layers: output of each decoder layer for the very first microbatch, or this process's part
            of its sequence.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    cross_entropies: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    router_losses: list[float] = field(default_factory=list)
    router_z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    layers: dict[str, Tensor] = field(default_factory=dict)


def make_batches(vocabulary: int, global_batch_size: int, kind: Rows) -> list[dict[str, Tensor]]:
    """Return one global batch per step. The number of trained tokens differs between samples."""
    stream = torch.Generator().manual_seed(5)
    rows, half = global_batch_size, global_batch_size // 2
    batches = []
    for step in range(STEPS):
        width = SEQUENCE - 4 * step if kind == "bucketed" else SEQUENCE
        shape = (rows, width)
        ids = torch.randint(0, vocabulary, shape, generator=stream)
        labels = torch.randint(0, vocabulary, shape, generator=stream)
        labels[torch.rand(shape, generator=stream) < 0.2 + 0.2 * step] = -100
        labels[:half][torch.rand((half, width), generator=stream) < 0.4] = -100
        # The second microbatch, on the first data rank, has no trained token.
        labels[MICRO_BATCH_SIZE : 2 * MICRO_BATCH_SIZE] = -100
        batch = {"input_ids": ids, "labels": labels}
        if kind in ("padded", "bucketed"):
            lengths = torch.randint(4, width + 1, (rows, 1), generator=stream)
            batch["attention_mask"] = (torch.arange(width) < lengths).long()
            labels[batch["attention_mask"] == 0] = -100
        if kind == "separate":
            begins = torch.rand(shape, generator=stream) < DOCUMENTS_PER_TOKEN
            starts = torch.where(begins, torch.arange(width), 0).cummax(1).values
            batch["position_ids"] = torch.arange(width) - starts
        batches.append(batch)
    return batches


def with_noise(initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters to train from, as of a half-trained model.

    No bias is 0, no norm is 1, and no product of an adapter is 0.
    """
    noisy = {}
    for number, (name, value) in enumerate(sorted(initial.items())):
        stream = torch.Generator().manual_seed(number)
        noisy[name] = value + NOISE * torch.randn(value.shape, generator=stream, dtype=value.dtype)
    return noisy


def neighbor_of(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return weights each of which is the next float64 above or below, at random."""
    stream = torch.Generator().manual_seed(seed)
    return {
        name: torch.nextafter(value, value + torch.randn(value.shape, generator=stream, dtype=value.dtype))
        for name, value in weights.items()
    }
