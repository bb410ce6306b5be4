"""The losses of routers in training, by the formulas of `formulas`.

Every loss belongs to one layer on one stage, so stages exchange no additional messages. The losses
of a layer are attached to its output, and the backward pass through that output starts the backward
pass of the losses.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.compat.transformers import checkpoint_of, set_checkpoint
from meshtrain.parallel.context.parts import ContextParallel
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.routers.formulas import RouterFormulas, find_routers

# The auxiliary loss and the z-loss.
MOST_TERMS = 2


class RouterLoss:
    """The losses in training: their gradients join every step, and their values are summed.

    Args:
        formulas: of the full model; None adds nothing.
        num_replicas: number of processes that get different tokens and sum their gradients.
        device: the device that computes.
        context: what this process does with its part of the sequences, if they are in parts.
    """

    def __init__(
        self,
        formulas: RouterFormulas | None,
        num_replicas: int,
        device: torch.device,
        context: ContextParallel | None = None,
    ) -> None:
        self.formulas, self.num_replicas = formulas, num_replicas
        terms = [] if formulas is None else formulas.terms
        self.total = torch.zeros(MOST_TERMS, dtype=torch.float64, device=device)
        self._coefficients = torch.tensor([term.coefficient for term in terms], dtype=torch.float64, device=device)
        self._share = self._scale = 1.0
        self._mask: Tensor | None = None
        self._context = context

    def begin_step(self, num_microbatches: int, loss_scale: float) -> None:
        """Reset `total` (MOST_TERMS,), which accumulates the losses of a step by their kind.

        After the step, the sum of `total` over the pp and dp axes is the mean.

        Args:
            num_microbatches: of this process, in this step.
            loss_scale: factor of the gradients of this step. `total` is not scaled.
        """
        self.total, self._scale = torch.zeros_like(self.total), loss_scale
        if self.formulas is not None:
            self._share = 1.0 / (self.formulas.num_routers * num_microbatches * self.num_replicas)

    def metrics(self, means: Sequence[float]) -> dict[str, float]:
        """Return the means of a step under their names; an empty table if there is no loss."""
        terms = () if self.formulas is None else self.formulas.terms
        return {term.name: mean for term, mean in zip(terms, means, strict=False)}

    def watch(self, stage: Stage) -> None:
        """Attach the losses of the layers of a stage to the outputs of the layers.

        Call it after recomputation is applied, and before FSDP2 adds its own hooks.
        """
        if self.formulas is None:
            return
        stage.model.register_forward_pre_hook(self._note_mask, with_kwargs=True)
        for layer in stage.own_layers():
            losses: dict[nn.Module, Tensor] = {}
            for _, router in find_routers(layer, self.formulas.recorder):
                router.register_forward_hook(torch.compiler.disable(partial(self._compute, losses)))
            layer.register_forward_hook(torch.compiler.disable(partial(self._carry, losses)))
            if getattr(layer, "gradient_checkpointing", False):
                set_checkpoint(layer, partial(self._checkpoint, checkpoint_of(layer), losses))

    def _note_mask(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._mask = kwargs.get("attention_mask") if self._context is None else self._context.pads

    def _compute(self, losses: dict[nn.Module, Tensor], router: nn.Module, args: Any, output: Any) -> None:
        if router.training:
            assert self.formulas is not None
            logits = self.formulas.logits_of(output)
            if self._context is not None:
                # A loss is not a sum over tokens, so all ranks compute that of all tokens.
                logits = self._context.full_rows(logits)
            losses[router] = torch.stack([term.function(logits, self._mask) for term in self.formulas.terms])

    def _carry(self, losses: dict[nn.Module, Tensor], layer: nn.Module, args: Any, output: Any) -> Any:
        if not losses:
            return None
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        values = torch.stack(list(losses.values()))
        carrier = _Carry.apply(hidden, values, self)  # type: ignore[no-untyped-call]
        losses.clear()
        if torch.is_grad_enabled() and not carrier.requires_grad:
            # Nothing up to here trains, so no backward pass comes by.
            self.start_backward(values)
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

        It is called once for each forward pass of training.

        Args:
            losses: (routers, terms).
        """
        self.total[: losses.shape[1]] += losses.double().sum(0) * self._share
        return (self._coefficients * (self._share * self._scale)).to(losses).expand_as(losses)


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
