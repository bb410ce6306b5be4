"""The auxiliary loss of the routers of a mixture of experts, which keeps the experts evenly used.

It is asked for by the Hugging Face configuration: `output_router_logits = True`, times `router_aux_loss_coef`.

Definition: for every router (one per layer of experts) and every microbatch, `load_balancing_loss_func` of the model's
own modelling module on the logits of that router alone, padding left out; of these numbers the mean over all routers,
microbatches and data ranks. transformers itself mixes the layers of a batch before it multiplies the shares of tokens
and of probability, which would need the logits of all stages on one process, and lets layers balance each other out.

So every number belongs to one layer on one stage, and nothing more passes between stages: a layer's output carries its
losses along, and the backward pass through that output starts theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from meshtrain.compat.transformers import checkpoint_of, named_function, router_recorder, set_checkpoint
from meshtrain.errors import ModelError
from meshtrain.parallel.cut.probe import asks_for_router_loss
from meshtrain.parallel.cut.stage import Stage


@dataclass(frozen=True)
class RouterFormula:
    """How a model class computes the auxiliary loss.

    Attributes:
        function: the model's own `load_balancing_loss_func`.
        num_experts: of a layer.
        top_k: how many of them a token goes to.
        coefficient: what the mean is multiplied by.
        recorder: says which modules are routers, and where in their output the logits are.
        num_routers: in the whole model.
    """

    function: Callable[..., Tensor]
    num_experts: int
    top_k: int
    coefficient: float
    recorder: OutputRecorder
    num_routers: int

    def __call__(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return the () loss of one router on one microbatch.

        Args:
            logits: (batch * seq, experts).
            mask: (batch, seq), 0 for padding.
        """
        return self.function((logits,), self.num_experts, self.top_k, mask)

    def logits_of(self, output: Any) -> Tensor:
        """Return the logits in what a router gives."""
        return output[self.recorder.index] if isinstance(output, tuple) else output


def find_formula(model: PreTrainedModel) -> RouterFormula | None:
    """Return the formula of a whole model, or None if its configuration does not ask for the loss.

    Raises:
        ModelError: if it asks for what the class does not have.
    """
    if not asks_for_router_loss(model):
        return None
    function = named_function(model, "load_balancing_loss_func")
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    num_experts, top_k, coefficient = (getattr(model, name, None) for name in names)
    recorder = router_recorder(model)
    if None in (num_experts, top_k, coefficient) or function is None or recorder is None:
        raise ModelError(
            "model.config.output_router_logits = True asks for the router's auxiliary loss, but "
            f"{type(model).__name__} has none that is known here (load_balancing_loss_func, with num_experts, "
            "num_experts_per_tok and router_aux_loss_coef of the model); set it to false"
        )
    routers = list(find_routers(model, recorder))
    if not routers:
        raise ModelError(
            "model.config.output_router_logits = True asks for the router's auxiliary loss, but this "
            f"{type(model).__name__} has no router; set it to false"
        )
    return RouterFormula(function, num_experts, top_k, coefficient, recorder, len(routers))  # type: ignore[arg-type]


def find_routers(model: nn.Module, recorder: OutputRecorder) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every router inside a module."""
    place = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else ""
    for name, module in model.named_modules():
        if isinstance(module, recorder.target_class) and place in f".{name}.":
            yield name, module


class RouterLoss:
    """Adds the gradient of the auxiliary loss to every training step, and its value up.

    Args:
        formula: of the whole model; None adds nothing.
        num_replicas: over how many processes gradients are summed that see different samples.
        device: where to compute.
    """

    def __init__(self, formula: RouterFormula | None, num_replicas: int, device: torch.device) -> None:
        self.formula, self.num_replicas = formula, num_replicas
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._share = self._scale = 1.0
        self._mask: Tensor | None = None

    def begin_step(self, num_microbatches: int, loss_scale: float) -> None:
        """Reset `total`, which then adds up: its sum over the pp and dp axes is the mean.

        Args:
            num_microbatches: of this process, in this step.
            loss_scale: what the gradients of this step are multiplied by; `total` is not.
        """
        self.total, self._scale = torch.zeros_like(self.total), loss_scale
        if self.formula is not None:
            self._share = 1.0 / (self.formula.num_routers * num_microbatches * self.num_replicas)

    def metrics(self, mean: float) -> dict[str, float]:
        """Return the mean of a step under its name; nothing if the loss is off."""
        return {} if self.formula is None else {"router_aux_loss": mean}

    def watch(self, stage: Stage) -> None:
        """Let the layers of a stage carry their losses: behind recomputation, before FSDP2 adds hooks of its own."""
        if self.formula is None:
            return
        stage.model.register_forward_pre_hook(self._note_mask, with_kwargs=True)
        for layer in stage.own_layers():
            losses: dict[nn.Module, Tensor] = {}
            for _, router in find_routers(layer, self.formula.recorder):
                router.register_forward_hook(torch.compiler.disable(partial(self._compute, losses)))
            layer.register_forward_hook(torch.compiler.disable(partial(self._carry, losses)))
            if getattr(layer, "gradient_checkpointing", False):
                set_checkpoint(layer, partial(self._checkpoint, checkpoint_of(layer), losses))

    def _note_mask(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._mask = kwargs.get("attention_mask")

    def _compute(self, losses: dict[nn.Module, Tensor], router: nn.Module, args: Any, output: Any) -> None:
        if router.training:
            assert self.formula is not None
            losses[router] = self.formula(self.formula.logits_of(output), self._mask)

    def _carry(self, losses: dict[nn.Module, Tensor], layer: nn.Module, args: Any, output: Any) -> Any:
        if not losses:
            return None
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        carrier = _Carry.apply(hidden, torch.stack(list(losses.values())), self)  # type: ignore[no-untyped-call]
        losses.clear()
        return (carrier, *rest) if isinstance(output, tuple) else carrier

    def _checkpoint(
        self,
        checkpoint: Callable[..., Any],
        losses: dict[nn.Module, Tensor],
        function: Callable[..., Any],
        *args: Any,
    ) -> Any:
        """Recompute with the mask of the same microbatch: the backward pass comes when others have gone forward."""
        mask, runs = self._mask, count()

        def run(*args: Any) -> Any:
            self._mask = mask
            try:
                return function(*args)
            finally:
                if next(runs) > 0:
                    # No hook of the layer takes what a recomputation leaves, and it would hold all of it.
                    losses.clear()

        return checkpoint(run, *args)

    def start_backward(self, losses: Tensor) -> Tensor:
        """Add the losses of a layer to `total`, once for each backward pass, and return their gradient."""
        assert self.formula is not None
        self.total += losses.double().sum() * self._share
        return torch.full_like(losses, self.formula.coefficient * self._share * self._scale)


class _Carry(torch.autograd.Function):
    """The identity of a hidden state, whose backward pass starts that of the losses beside it.

    Source: Megatron-LM, megatron/core/transformer/moe/moe_utils.py, MoEAuxLossAutoScaler.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, losses: Tensor, router_loss: RouterLoss
    ) -> Tensor:
        # Not saved as the tensors of a graph are: a recomputation would have to run to the end of the layer for it.
        ctx.losses, ctx.router_loss = losses.detach(), router_loss  # type: ignore[attr-defined]
        # Not a view: a schedule that splits the backward pass detaches the output of its stage in place.
        return hidden.detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.router_loss.start_backward(ctx.losses), None  # type: ignore[attr-defined]
