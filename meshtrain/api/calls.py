"""Hooks around every call of a parallel model without a pipeline."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from meshtrain.api.batches import check_same_batch, mask_without_cache
from meshtrain.api.dropout import ProgramStreams
from meshtrain.api.gradients import GradientCompletion
from meshtrain.api.handle import Handle
from meshtrain.api.loss import LossOfAllRanks
from meshtrain.api.parts import PartsOfCalls
from meshtrain.compat.distributed import is_inside_ddp
from meshtrain.config.mesh import AXES, CP, TP
from meshtrain.errors import ModelError
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import fsdp_modules, mark_gathered, reshard
from meshtrain.parallel.tensor.region import sequence_is_split
from meshtrain.parallel.tensor.sequence import join_hidden_states
from meshtrain.parallel.tokens import check_tokens
from meshtrain.runtime.mesh import all_reduce_over, axis_size


class Calls:
    """Surrounds every call of the model with checks; the forward pass itself is the stock one."""

    def __init__(self, model: PreTrainedModel, handle: Handle, gradients: GradientCompletion) -> None:
        self._model, self._handle, self._gradients = model, handle, gradients
        self._streams = ProgramStreams(handle)
        self._loss = LossOfAllRanks(model, handle.pipeline.mesh)
        self._parts = _parts_of_calls(model, handle.pipeline)
        parameters = inspect.signature(model.forward).parameters
        self._names = [*parameters]
        # Some classes take it for their base model, by further keyword arguments.
        self._takes_cache = "use_cache" in parameters or any(it.kind == it.VAR_KEYWORD for it in parameters.values())
        self._is_inside = self._has_gathered = False

    def watch(self) -> None:
        """Register the hooks for every call from now on."""
        # Before all other hooks: those of FSDP2 gather parameters, and those of dropout seed the
        # generators.
        self._model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self._model.register_forward_hook(self._after, with_kwargs=True)
        self._model.register_forward_hook(self._leave, always_call=True)
        ends = {"embedding": self._model.get_input_embeddings(), "head": self._model.get_output_embeddings()}
        for what, module in ends.items():
            if module is not None:
                module.register_forward_pre_hook(partial(self._check_end, what), prepend=True)
        if self._model.base_model is not self._model:
            self._model.base_model.register_forward_pre_hook(self._check_inside, prepend=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._handle.check_values()
        given = self._given(args, kwargs)
        self._check_options(given)
        self._gradients.recover()
        has_labels = given.get("labels") is not None
        if not self._handle.is_generating:
            # Parameters that a forward pass without a backward pass has gathered may have changed
            # since.
            reshard(model)
            check_tokens(self._handle.pipeline, given.get("input_ids"))
            check_same_batch(self._handle.pipeline, given)
            if self._parts is not None:
                self._parts.begin(given, self._loss.shifts)
        if torch.is_grad_enabled() or has_labels:
            _check_same_call(self._handle.pipeline, has_labels=has_labels)
            self._handle.pipeline.rotary_length.begin(given)
        elif self._is_in_parts():
            self._handle.pipeline.rotary_length.begin(given, is_alone=True)
        recomputes = torch.is_grad_enabled() and self._handle.pipeline.plan.recompute.mode != "none"
        if (recomputes or self._is_in_parts()) and self._takes_cache:
            # A recomputed layer would find its own entries in the cache, and over cp a process has
            # only those of its part.
            mask = mask_without_cache(self._model.config, given)
            args, kwargs = (), given | {"use_cache": False} | ({} if mask is None else {"attention_mask": mask})
        if model.training:
            self._streams.begin()
        self._is_inside = True
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = self._given(args, kwargs)
        if self._has_tp_parts() and isinstance(output, ModelOutput):
            tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
            mesh = self._handle.pipeline.mesh
            join_hidden_states(output, tokens.shape[1] // axis_size(mesh, CP), mesh.get_group(TP))
        if self._parts is not None and self._is_in_parts():
            self._parts.join(output)
        self._loss.put_into(output, given)
        if torch.is_grad_enabled():
            self._gradients.watch(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, *_: Any) -> None:
        self._is_inside = False
        self._handle.pipeline.rotary_length.end()
        if self._parts is not None:
            self._parts.end()
        self._streams.end()
        if torch.is_grad_enabled():
            mark_gathered(self._model)
        elif not self._handle.is_generating:
            # No backward pass will reshard, and an optimizer that is made now must find the model's
            # own parameters.
            reshard(self._model)

    def _is_in_parts(self) -> bool:
        return self._parts is not None and not self._handle.is_generating

    def _has_tp_parts(self) -> bool:
        mesh, plan = self._handle.pipeline.mesh, self._handle.pipeline.plan
        return plan.tensor.sequence_parallel and axis_size(mesh, TP) > 1 and sequence_is_split()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check_end(self, what: str, *_: Any) -> None:
        if not self._is_inside and fsdp_modules(self._model):
            raise ModelError(
                f"the {what} of a model over dp_shard was called by itself, but a rank has its full weight only "
                "inside a call of the model",
                "call the model itself, with input_ids, and use its logits",
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check_inside(self, *_: Any) -> None:
        if not self._is_inside:
            raise ModelError(
                "a part of a parallel model was called by itself, so its gradients would not be summed over the ranks",
                "call the model itself, and use model(..., output_hidden_states=True).hidden_states[-1]",
            )

    def _check_options(self, given: Mapping[str, Any]) -> None:
        """Refuse options whose result would be silently wrong, or that would fail much later.

        Raises:
            ModelError: naming the option.
        """
        if axis_size(self._handle.pipeline.mesh, TP) > 1 and self._is_requested(given, "output_attentions"):
            raise ModelError(
                "output_attentions = True: over tp every rank has the attention of its own heads only",
                "leave it out, or use a mesh with tp = 1",
            )
        if is_inside_ddp():
            raise ModelError(
                "the model is wrapped in DistributedDataParallel, which would reduce its gradients a second time",
                'leave it out, and use the dp axes of the mesh: {"mesh": {"dp_replicate": 2}}',
            )
        if torch.is_inference_mode_enabled() and not self._has_gathered and fsdp_modules(self._model):
            raise ModelError(
                "the first forward pass of a model over dp_shard was called under torch.inference_mode(), and what is "
                "gathered there can never be trained",
                "use torch.no_grad()",
            )
        self._has_gathered = True
        if (
            self._has_tp_parts()
            and given.get("return_dict") is False
            and self._is_requested(given, "output_hidden_states")
        ):
            raise ModelError(
                "return_dict = False with output_hidden_states = True: under tensor.sequence_parallel the hidden "
                "states are gathered into the fields of the output, and a tuple has none",
                "leave return_dict out",
            )

    def _is_requested(self, given: Mapping[str, Any], name: str) -> bool:
        wanted = given.get(name)
        return bool(getattr(self._model.config, name, False) if wanted is None else wanted)

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False)) | dict(kwargs)


def _parts_of_calls(model: PreTrainedModel, pipeline: Pipeline) -> PartsOfCalls | None:
    if pipeline.context is None:
        return None
    return PartsOfCalls(model, pipeline.plan, pipeline.context, is_chunked=pipeline.head is not None)


def _check_same_call(pipeline: Pipeline, *, has_labels: bool) -> None:
    """Check that all ranks or none compute a loss, and train the same parameters. Collective.

    It is collective over all axes. A rank with a loss would wait for those without one, and copies
    of a parameter that is frozen on one rank alone would silently drift apart.

    Args:
        pipeline: of the model that is called.
        has_labels: whether this rank has passed labels.

    Raises:
        ModelError: on all ranks alike.
    """
    if axis_size(pipeline.mesh, *AXES) == 1:
        return
    trains = [parameter.requires_grad for _, parameter in pipeline.named_parameters()]
    digest = xxhash.xxh3_64_intdigest(bytes([has_labels, *trains])) >> 2
    # One message carries the maximum and, negated, the minimum.
    extremes = all_reduce_over(torch.tensor([digest, -digest]), pipeline.mesh, AXES, dist.ReduceOp.MAX)
    if int(extremes[0]) != -int(extremes[1]):
        raise ModelError(
            f"rank {dist.get_rank()} calls the model {'with' if has_labels else 'without'} labels and trains "
            f"{sum(trains)} of {len(trains)} parameters, but another rank differs",
            "pass labels on all ranks or on none, and freeze the same parameters on all",
        )
