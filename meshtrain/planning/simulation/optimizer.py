"""The optimizer of a run over fake tensors."""

from torch import Tensor, nn
from torch.optim import Optimizer

from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.training.optim import build_optimizer


class FakeOptimizer(Optimizer):
    """The optimizer of a run for parameters without memory.

    A LocalParameter is a tensor of a class of its own, and so is a fake tensor, so that the two
    cannot be combined. This optimizer has a plain parameter for each local part instead, and is
    given the gradient before each step.

    Args:
        pipeline: whose parameters it trains.
        config: of the optimizer.
    """

    def __init__(self, pipeline: Pipeline, config: OptimizerConfig) -> None:
        self._full: list[nn.Parameter] = []
        self._local: list[nn.Parameter] = []
        self._optimizer = build_optimizer(pipeline, config, self._plain)
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state

    def _plain(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a plain parameter for the local part of one, and remember both."""
        local = nn.Parameter(local_tensor(parameter.detach()))
        self._full.append(parameter)
        self._local.append(local)
        return local

    def states(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        return [value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)]

    def make_states(self) -> None:
        """Take a step with zero gradients, so that the state exists."""
        for local in self._local:
            local.grad = local.new_zeros(local.shape)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients."""
        for full in self._full:
            full.grad = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters for which the model has a gradient."""
        for full, local in zip(self._full, self._local, strict=True):
            local.grad = None if full.grad is None else local_tensor(full.grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
