"""A parallel model with a pipeline. No rank holds it in full; it takes complete batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from meshtrain.api.dropout import ProgramStreams
from meshtrain.api.gradients import add_gradients, set_gradients_aside
from meshtrain.api.handle import ATTRIBUTE, Handle
from meshtrain.api.pipeline_batches import BatchChecker, CheckedBatch
from meshtrain.api.saving import save_parallelized, save_pretrained, without_stock_keywords
from meshtrain.config.mesh import DATA_AXES, PP, TOKEN_AXES
from meshtrain.errors import MissingAttribute, ModelError, Problem, UserError
from meshtrain.inference.generation import generate_on_mesh
from meshtrain.parallel.head.chunks import LossFunction
from meshtrain.parallel.pipeline import NOTHING_TRAINS
from meshtrain.runtime.mesh import all_reduce_over, axis_size, data_rank
from meshtrain.training.gradients import complete_gradients
from meshtrain.training.loss import build_loss
from meshtrain.training.own_loss import build_own_loss

TRAIN = "call loss = model.forward_backward(batch) to train on a complete batch, or model.evaluate(batch) for its loss"
# Why something is refused, and what to do instead.
MOVE = (
    "every rank keeps its stages on its own device",
    "leave the call out, and choose number formats with model.to(...) before meshtrain.parallelize or in [precision] "
    "of the plan",
)
MODULES = "a rank holds its stages only", "use the stock model for this, before meshtrain.parallelize"
RECOMPUTE = "", 'set {"recompute": {"mode": "full"}} in the plan, or "none"'
ALTERNATIVES = {
    **dict.fromkeys(("forward", "loss", "loss_function"), ("", TRAIN)),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"), MOVE),
    "state_dict": ("", "call meshtrain.save_checkpoint(directory, state), or model.save_pretrained(folder)"),
    "load_state_dict": (
        "",
        "call meshtrain.load_checkpoint(directory, state), or meshtrain.load_weights(model, folder)",
    ),
    "requires_grad_": (
        "",
        "freeze with parameter.requires_grad_(False) for name, parameter in model.named_parameters()",
    ),
    **dict.fromkeys(("gradient_checkpointing_enable", "gradient_checkpointing_disable"), RECOMPUTE),
    "compile": ("", 'set {"compile": {"enabled": true}} in the plan'),
    "resize_token_embeddings": ("", "call it on the stock model before meshtrain.parallelize"),
}


class PipelinedModel:
    """The stages that this rank holds of a model, and how they train with those of the other ranks.

    Every call is collective: all ranks make it. Ranks that share a model (pp, cp and tp) pass the
    same batch; over the dp axes each passes its own part. `meshtrain.generate`, `save_pretrained`,
    `save_checkpoint` and `clip_grad_norm` take it like a model without a pipeline. A tied weight
    has two copies, on the first stage and on the last. Freeze the first, under the name that the
    stock model has for it, to freeze both.

    Args:
        handle: of the model.
        shifts_labels: whether the loss of the model's class shifts labels.
        loss: the program's own; None: the cross-entropy.
    """

    def __init__(self, handle: Handle, *, shifts_labels: bool, loss: LossFunction | None = None) -> None:
        setattr(self, ATTRIBUTE, handle)
        self._handle = handle
        self._pipeline = handle.pipeline
        self._streams = ProgramStreams(handle)
        self._batches = BatchChecker(handle.pipeline, handle.device, shifts_labels=shifts_labels)
        self._failure: str | None = None
        self._loss = build_loss(handle.pipeline) if loss is None else build_own_loss(handle.pipeline, loss)

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration of the full model."""
        return self._pipeline.stages[0].model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of `generate`; may be set, on all ranks alike."""
        return self._pipeline.stages[0].model.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self._pipeline.set_generation_config(config)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._handle.device

    @property
    def training(self) -> bool:
        """Whether dropout is on."""
        return self._pipeline.stages[0].model.training

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self._pipeline.has_last_stage

    @property
    def data_rank(self) -> int:
        """The part of every global batch that this rank reads: 0 to `num_data_ranks` - 1."""
        return data_rank(self._pipeline.mesh)

    @property
    def num_data_ranks(self) -> int:
        """The number of parts in which a global batch is read."""
        return axis_size(self._pipeline.mesh, *DATA_AXES)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their stock names; a fused projection in its parts."""
        return self._pipeline.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's parameters, for an optimizer; then call `meshtrain.rebind(optimizer)`.

        Pass all of them, including frozen ones, which the optimizer leaves alone. A rank may have
        no trained parameters, and torch makes no optimizer without parameters.
        """
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> "PipelinedModel":
        """Switch dropout on or off, as `nn.Module.train` does."""
        for stage in self._pipeline.stages:
            stage.model.train(mode)
        return self

    def eval(self) -> "PipelinedModel":
        """Switch dropout off."""
        return self.train(mode=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or fill them with zeros."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)

    def forward_backward(self, batch: Mapping[str, Any]) -> Tensor:
        """Run all microbatches of a batch forward and backward. Every gradient is complete then.

        As with `loss.backward()`, gradients are added to existing ones: call
        `optimizer.zero_grad()` before.

        Args:
            batch: `input_ids` (rows, seq), `labels` (rows, seq) as the class takes them, -100 where
                a token is not to count, and further inputs of the model, such as `attention_mask`
                (rows, seq). Most classes take unshifted labels; the decoders of BART and similar
                models take shifted ones. The number of rows is a multiple of the micro batch size,
                and large enough for the schedule. Entries that are None are left out.
                With `use_cache` False, here or in the configuration, documents of one row are kept
                apart where `position_ids` start from 0 again, as in the stock call.

        Returns:
            () float64, the same on every rank: the mean loss over the trained tokens of all data
            ranks, in nats; without the auxiliary loss of routers, which is trained nevertheless.

        Raises:
            ModelError: if the parameters have no values yet, all are frozen, gradients are switched
                off, or an earlier batch has ended with an exception halfway.
            DataError: on all ranks alike: the batch does not fit the plan or the model, or differs
                between ranks that share a model.
        """
        checked = self._take(batch)
        if not checked.trains:
            raise ModelError(NOTHING_TRAINS)
        if not torch.is_grad_enabled():
            raise ModelError("forward_backward was called under torch.no_grad()", "call it outside, or evaluate(batch)")
        earlier = set_gradients_aside(self._pipeline)
        try:
            with self._streams_of_model(), self._exchange("forward_backward"):
                local = self._pipeline.forward_backward(checked.inputs, self._loss.mean_over(checked.num_tokens))
                complete_gradients(self._pipeline)
        except BaseException:
            # The new gradients are in part those of this rank alone.
            for parameter, gradient in earlier.items():
                parameter.grad = gradient
            raise
        add_gradients(earlier)
        return self._summed(local)

    def evaluate(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the mean loss of a batch, without dropout and gradients.

        Arguments and errors are those of `forward_backward`.
        """
        checked = self._take(batch)
        with self._exchange("evaluate"):
            return self._summed(self._pipeline.evaluate(checked.inputs, self._loss.mean_over(checked.num_tokens)))

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Any:
        """Generate as the stock model does; see `meshtrain.generate`. Collective."""
        self._handle.check_values()
        self._check_stages_wait_for_nothing()
        if generation_config is not None:
            options["generation_config"] = generation_config
        return generate_on_mesh(self._pipeline, inputs, **options)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Call `meshtrain.save_pretrained`. Collective."""
        save_pretrained(self, save_directory, **without_stock_keywords(kwargs))

    def save_parallelized(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Call `meshtrain.save_parallelized`. Collective."""
        save_parallelized(self, save_directory, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise ModelError("a model over pp cannot be called, because no rank has all of it", TRAIN)

    def __getattr__(self, name: str) -> NoReturn:
        # Python calls this for missing attributes only. Python itself and libraries probe names
        # with an underscore.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise MissingAttribute(_refused(f"a model over pp has no {name}", name))

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute that may be set, or one that a program adds.

        Raises:
            ModelError: for an attribute that would change a stock model but has no effect here.
        """
        is_own = name.startswith("_") or name in (ATTRIBUTE, "generation_config")
        stock = None if is_own else self._pipeline.stages[0].model
        if not is_own and (name in ALTERNATIVES or hasattr(type(self), name) or hasattr(stock, name)):
            raise ModelError(_refused(f"{name} of a model over pp cannot be set", name))
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._handle.__deepcopy__(memo)

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            "a parallel model can be neither copied nor pickled, because no rank has all of it",
            "save it with model.save_pretrained(folder), or with its optimizer by "
            "meshtrain.save_checkpoint(directory, state)",
        )

    def _take(self, batch: Mapping[str, Any]) -> CheckedBatch:
        self._handle.check_values()
        self._check_stages_wait_for_nothing()
        return self._batches.take(batch)

    def _check_stages_wait_for_nothing(self) -> None:
        if self._failure is not None:
            raise ModelError(
                f"{self._failure}: the stages on other ranks wait for messages that never come, so this model cannot "
                "be used any more",
                "end the program on all ranks, and start again from a checkpoint",
            )

    @contextmanager
    def _exchange(self, call: str) -> Iterator[None]:
        """Remember an exception in a pass, after which the model cannot be used.

        Messages between stages are lost then, and the next batch would receive those of this one.
        """
        try:
            yield
        except UserError:
            # All ranks raise it, before anything was sent.
            raise
        except BaseException as error:
            self._failure = f"an earlier {call} has ended halfway with an exception ({type(error).__name__})"
            raise

    @contextmanager
    def _streams_of_model(self) -> Iterator[None]:
        self._streams.begin()
        try:
            yield
        finally:
            self._streams.end()

    def _summed(self, local: Tensor) -> Tensor:
        return all_reduce_over(local.detach().clone(), self._pipeline.mesh, (PP, *TOKEN_AXES))


def _refused(found: str, name: str) -> Problem:
    reason, advice = ALTERNATIVES.get(name, MODULES)
    return Problem(f"{found}: {reason}" if reason else found, advice)
