"""The auxiliary loss of the routers of a mixture of experts, which balances the use of the experts.

The Hugging Face configuration enables it by `output_router_logits = True`. The loss is multiplied
by `router_aux_loss_coef`.

Definition: every router (one per layer of experts) and every microbatch has one loss. It is
`load_balancing_loss_func` of the model's own modeling module, applied to the logits of that router
alone, without padding. The result is the mean over all routers, microbatches and data ranks.

transformers itself combines the layers of a batch before it multiplies the shares of tokens and of
probability. That would need the logits of all stages on one process, and it lets layers compensate
for each other.

Here every loss belongs to one layer on one stage, so stages exchange no additional messages. The
losses of a layer are attached to its output, and the backward pass through that output starts the
backward pass of the losses.
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
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.cut.probe import asks_for_router_loss
from meshtrain.parallel.cut.stage import Stage


@dataclass(frozen=True)
class RouterFormula:
    """How a model class computes the auxiliary loss.

    Attributes:
        function: the model's own `load_balancing_loss_func`.
        num_experts: number of experts in a layer.
        top_k: number of experts that each token goes to.
        coefficient: factor of the mean.
        recorder: defines which modules are routers, and the position of the logits in their output.
        num_routers: number of routers in the full model.
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
        """Return the logits in the output of a router."""
        return output[self.recorder.index] if isinstance(output, tuple) else output


def find_formula(model: PreTrainedModel) -> RouterFormula | None:
    """Return the formula of a model, or None if its configuration does not ask for the loss.

    Args:
        model: the full model.

    Raises:
        ModelError: if the configuration asks for the loss, but the class does not support it.
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
            "num_experts_per_tok and router_aux_loss_coef of the model)",
            "set it to false",
        )
    routers = list(find_routers(model, recorder))
    if not routers:
        raise ModelError(
            "model.config.output_router_logits = True asks for the router's auxiliary loss, but this "
            f"{type(model).__name__} has no router",
            "set it to false",
        )
    return RouterFormula(function, num_experts, top_k, coefficient, recorder, len(routers))  # type: ignore[arg-type]


def find_routers(model: nn.Module, recorder: OutputRecorder) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of every router inside a module."""
    path = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else ""
    for name, module in model.named_modules():
        if isinstance(module, recorder.target_class) and path in f".{name}.":
            yield name, module


class RouterLoss:
    """The auxiliary loss in training: its gradient joins every step, and its value is summed.

    Args:
        formula: of the full model; None adds nothing.
        num_replicas: number of processes that get different tokens and sum their gradients.
        device: the device that computes.
        context: what this process does with its part of the sequences, if they are in parts.
    """

    def __init__(
        self,
        formula: RouterFormula | None,
        num_replicas: int,
        device: torch.device,
        context: ContextParallel | None = None,
    ) -> None:
        self.formula, self.num_replicas = formula, num_replicas
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._share = self._scale = 1.0
        self._mask: Tensor | None = None
        self._context = context

    def begin_step(self, num_microbatches: int, loss_scale: float) -> None:
        """Reset `total`, which accumulates the losses of a step.

        After the step, the sum of `total` over the pp and dp axes is the mean.

        Args:
            num_microbatches: of this process, in this step.
            loss_scale: factor of the gradients of this step. `total` is not scaled.
        """
        self.total, self._scale = torch.zeros_like(self.total), loss_scale
        if self.formula is not None:
            self._share = 1.0 / (self.formula.num_routers * num_microbatches * self.num_replicas)

    def metrics(self, mean: float) -> dict[str, float]:
        """Return the mean of a step under its name; an empty table if the loss is off."""
        return {} if self.formula is None else {"router_aux_loss": mean}

    def watch(self, stage: Stage) -> None:
        """Attach the losses of the layers of a stage to the outputs of the layers.

        Call it after recomputation is applied, and before FSDP2 adds its own hooks.
        """
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
        self._mask = kwargs.get("attention_mask") if self._context is None else self._context.pads

    def _compute(self, losses: dict[nn.Module, Tensor], router: nn.Module, args: Any, output: Any) -> None:
        if router.training:
            assert self.formula is not None
            logits = self.formula.logits_of(output)
            if self._context is not None:
                # The loss is not a sum over tokens, so all ranks compute that of all tokens.
                logits = self._context.full_rows(logits)
            losses[router] = self.formula(logits, self._mask)

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
        """Let a layer recompute with the mask of its own microbatch.

        Other microbatches may run forward before the backward pass of this one.
        """
        mask, runs = self._mask, count()

        def run(*args: Any) -> Any:
            self._mask = mask
            try:
                return function(*args)
            finally:
                if next(runs) > 0:
                    # No hook of the layer takes the losses of a recomputation, and they would keep
                    # the recomputed tensors in memory.
                    losses.clear()

        return checkpoint(run, *args)

    def start_backward(self, losses: Tensor) -> Tensor:
        """Add the losses of a layer to `total`, and return their gradient.

        It is called once for each backward pass.
        """
        assert self.formula is not None
        self.total += losses.double().sum() * self._share
        return torch.full_like(losses, self.formula.coefficient * self._share * self._scale)


class _Carry(torch.autograd.Function):
    """The identity of the hidden states, whose backward pass starts that of the attached losses.

    Source: Megatron-LM, megatron/core/transformer/moe/moe_utils.py, MoEAuxLossAutoScaler.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, losses: Tensor, router_loss: RouterLoss
    ) -> Tensor:
        # save_for_backward is not used, because a recomputation would then have to run to the end
        # of the layer.
        ctx.losses, ctx.router_loss = losses.detach(), router_loss  # type: ignore[attr-defined]
        # The result must not be a view, because a schedule that splits the backward pass detaches
        # the output of its stage in place.
        return hidden.detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.router_loss.start_backward(ctx.losses), None  # type: ignore[attr-defined]
