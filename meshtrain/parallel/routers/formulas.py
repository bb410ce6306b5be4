"""The losses of the routers of a model class, as functions of the logits of one router.

auxiliary: balances the use of the experts. The Hugging Face configuration asks for it by
`output_router_logits = True`, and has its coefficient, `router_aux_loss_coef`.
z-loss: keeps the logits small. The run asks for it by `router.z_loss`, its coefficient.

Definition: every router (one per layer of experts) and every microbatch has one loss of each kind,
without padding. The result is the mean over all routers, microbatches and data ranks.

transformers itself combines the layers of a batch before it multiplies the shares of tokens and of
probability. That would need the logits of all stages on one process, and it lets layers compensate
for each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from meshtrain.compat.transformers import named_function, router_recorder
from meshtrain.config.run import RouterConfig
from meshtrain.errors import ModelError
from meshtrain.parallel.cut.probe import asks_for_router_loss

# Names of the metrics.
AUXILIARY_LOSS, Z_LOSS = "router_aux_loss", "router_z_loss"


@dataclass(frozen=True)
class RouterTerm:
    """One kind of loss.

    Attributes:
        name: of its mean in the metrics.
        coefficient: factor of the mean.
        function: called with the logits of a router on a microbatch (batch * seq, experts) and a
            mask (batch, seq), which is 0 for padding, or None. Returns the () loss.
    """

    name: str
    coefficient: float
    function: Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class RouterFormulas:
    """How the losses of the routers of a model are computed.

    Attributes:
        terms: the kinds of loss; at least one.
        recorder: defines which modules are routers, and the position of the logits in their output.
        num_routers: number of routers in the full model.
        asked_by: the settings that ask for them, in words.
        otherwise: how to take that back.
    """

    terms: tuple[RouterTerm, ...]
    recorder: OutputRecorder
    num_routers: int
    asked_by: str
    otherwise: str

    def logits_of(self, output: Any) -> Tensor:
        """Return the logits in the output of a router."""
        return output[self.recorder.index] if isinstance(output, tuple) else output


def find_formulas(model: PreTrainedModel, router: RouterConfig) -> RouterFormulas | None:
    """Return the losses of a model, or None if neither its configuration nor the run asks for one.

    Args:
        model: the full model.
        router: of the run.

    Raises:
        ModelError: if one is asked for that the class does not support.
    """
    terms, settings, otherwise = [], [], []
    if asks_for_router_loss(model):
        terms.append(_auxiliary_loss(model))
        settings.append("model.config.output_router_logits = True")
        otherwise.append("set output_router_logits to false")
    if router.z_loss:
        terms.append(RouterTerm(Z_LOSS, router.z_loss, z_loss))
        settings.append(f"router.z_loss = {router.z_loss}")
        otherwise.append("leave router.z_loss out")
    if not terms:
        return None
    asked_by = f"{' and '.join(settings)} ask{'s' if len(settings) == 1 else ''} for losses of the routers"
    recorder = router_recorder(model)
    routers = [] if recorder is None else list(find_routers(model, recorder))
    if recorder is None or not routers:
        raise ModelError(
            f"{asked_by}, but this {type(model).__name__} has no router that is known here", " and ".join(otherwise)
        )
    return RouterFormulas(tuple(terms), recorder, len(routers), asked_by, " and ".join(otherwise))


def find_routers(model: nn.Module, recorder: OutputRecorder) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of every router inside a module."""
    path = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else ""
    for name, module in model.named_modules():
        if isinstance(module, recorder.target_class) and path in f".{name}.":
            yield name, module


def z_loss(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the () mean over tokens of log(sum of exp(logits))^2.

    Args:
        logits: (batch * seq, experts).
        mask: (batch, seq), 0 for padding.

    Source: ST-MoE (arXiv:2202.08906), equation 5.
    """
    squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
    if mask is None:
        return squares.mean()
    kept = mask.flatten().to(squares)
    return (squares * kept).sum() / kept.sum().clamp(min=1)


def _auxiliary_loss(model: PreTrainedModel) -> RouterTerm:
    function = named_function(model, "load_balancing_loss_func")
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    num_experts, top_k, coefficient = (getattr(model, name, None) for name in names)
    if num_experts is None or top_k is None or coefficient is None or function is None or not router_recorder(model):
        raise ModelError(
            "model.config.output_router_logits = True asks for the router's auxiliary loss, but "
            f"{type(model).__name__} has none that is known here (load_balancing_loss_func, with num_experts, "
            "num_experts_per_tok and router_aux_loss_coef of the model)",
            "set it to false",
        )
    return RouterTerm(AUXILIARY_LOSS, coefficient, lambda logits, mask: function((logits,), num_experts, top_k, mask))
