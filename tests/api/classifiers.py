"""Classifiers on a mesh beside the stock models: losses, logits and gradients."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

import meshtrain
from meshtrain.api.handle import pipeline_of
from meshtrain.models.fused import join_parts
from meshtrain.parallel.pipeline import full_tensor
from tests.parallel.families import NO_DROPOUT, SIZES, VOCABULARY, Float64

ROWS, LENGTH, NUM_LABELS = 4, 8, 3
KINDS: dict[str, Any] = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
}


@dataclass(frozen=True)
class Classifier:
    """A tiny classifier and its training."""

    model_type: str
    problem: str | None = "single_label_classification"
    kind: str = "sequence"
    tensor: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        known = {*AutoConfig.for_model(self.model_type).to_dict(), *AutoConfig.for_model(self.model_type).attribute_map}
        sizes = {name: value for name, value in (SIZES | NO_DROPOUT).items() if name in known}
        labels = 1 if self.problem == "regression" else NUM_LABELS
        labels = 2 if self.kind == "question" else labels
        config = AutoConfig.for_model(self.model_type, **sizes, num_labels=labels, problem_type=self.problem)
        config.classifier_dropout = 0.0
        config._experts_implementation = "eager"
        return config

    def model(self) -> PreTrainedModel:
        # The position tables are then in float64, too.
        model = KINDS[self.kind].from_config(self.config(), attn_implementation="eager").double()
        stream = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.1, generator=stream)
        return model.train()

    def batch(self) -> dict[str, Tensor]:
        """Return rows of different lengths, padded on either side."""
        stream = torch.Generator().manual_seed(3)
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=stream)
        mask = torch.ones_like(ids)
        mask[0, 5:] = mask[3, 6:] = 0
        if self.kind == "sequence":
            mask[2, :2] = 0
        return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, **self._targets(stream)}

    def _targets(self, stream: torch.Generator) -> dict[str, Tensor]:
        def draw(*shape: int, below: int = NUM_LABELS) -> Tensor:
            return torch.randint(below, shape, generator=stream)

        if self.kind == "token":
            return {"labels": draw(ROWS, LENGTH)}
        if self.kind == "question":
            return {"start_positions": draw(ROWS, below=LENGTH), "end_positions": draw(ROWS, below=LENGTH)}
        if self.problem == "regression":
            return {"labels": torch.randn(ROWS, generator=stream, dtype=torch.float64)}
        if self.problem == "multi_label_classification":
            return {"labels": draw(ROWS, NUM_LABELS, below=2).to(torch.float64)}
        return {"labels": draw(ROWS)}


def errors_on(mesh: dict[str, int], classifiers: list[Classifier]) -> list[dict[str, float]]:
    """Return for each classifier the errors of loss, logits and gradients: name -> error."""
    with Float64():
        return [_errors(mesh, classifier) for classifier in classifiers]


def _errors(mesh: dict[str, int], classifier: Classifier) -> dict[str, float]:
    stock, batch = classifier.model(), classifier.batch()
    expected = stock(**batch)
    expected.loss.backward()
    plan = {"mesh": mesh, "tensor": classifier.tensor} if classifier.tensor else {"mesh": mesh}
    model = meshtrain.parallelize(classifier.model(), plan, prove_unknown_class=False)
    size = ROWS // mesh.get("dp_shard", 1)
    rows = slice(dist.get_rank() // mesh["tp"] * size, (dist.get_rank() // mesh["tp"] + 1) * size)
    found = model(**{name: value[rows] for name, value in batch.items()})
    found.loss.backward()
    pipeline = pipeline_of(model)
    gradients = {name: full_tensor(p.grad).detach() for name, p in pipeline.owned_parameters().items()}
    gradients = dict(join_parts(gradients, pipeline.fused))
    wanted = {name: parameter.grad for name, parameter in stock.named_parameters()}
    assert gradients.keys() == wanted.keys()
    names = ("start_logits", "end_logits") if classifier.kind == "question" else ("logits",)
    errors = {name: _error(found[name], expected[name][rows]) for name in names}
    errors["loss"] = _error(found.loss, expected.loss)
    return errors | {name: _error(gradients[name], wanted[name]) for name in wanted}


def _error(found: Tensor, wanted: Tensor) -> float:
    # Softmax ignores the bias of keys: its gradient is zero, up to rounding noise on both sides.
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-4)).item()
