"""A pipeline as one model, for transformers' own `generate`.

The loop of `generate` runs on every process of the pipeline. The model that it calls has a forward
that runs all stages one after another, and returns the logits of the last stage on every process.
So what `generate` can do, it can do here as well.
"""

import copy
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from meshtrain.compat.nn import instance_of, set_forward
from meshtrain.compat.transformers import keeps_keys_and_values
from meshtrain.config.mesh import PP, TP
from meshtrain.errors import ModelError, UserError, name_some
from meshtrain.models.build import stock_class
from meshtrain.parallel.borders import received_like
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.schedule import ForwardMessages, stage_owners
from meshtrain.parallel.tensor.collectives import gather_vocabulary
from meshtrain.runtime.mesh import axis_size

KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
# Arguments that a forward pass of the full model supports, and one stage does not.
FULL_MODEL_ONLY = ("inputs_embeds", "output_attentions", "output_hidden_states")


def as_one_model(pipeline: Pipeline) -> PreTrainedModel:
    """Return a model with the parts of this process's first stage, whose forward runs all stages.

    The forward has the signature of the stock model. It is collective: all processes of the
    pipeline must call it alike.
    """
    stage = pipeline.stages[0].model
    # The class of the stage is not called: FSDP2's would build another model, and its hooks belong
    # to the stage.
    stock = stock_class(stage)
    model: PreTrainedModel = instance_of(stock, stage)
    run = _Stages(pipeline)

    @wraps(stock.forward.__get__(model))
    def forward(input_ids: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
        return run(input_ids, **inputs)

    set_forward(model, forward)
    return model


class _Stages:
    """Runs the stages of this process, with a cache for each."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.owners = stage_owners(pipeline.plan.pipeline, axis_size(pipeline.mesh, PP))
        self.caches = _StageCaches(pipeline.stages)

    def __call__(
        self, input_ids: Tensor | None, past_key_values: Cache | None = None, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Run one forward pass.

        Args:
            input_ids: (batch, seq), the tokens that are not in the cache yet.
            past_key_values: the cache of `generate`; these tokens are added to it.
            inputs: further arguments of the stock forward.

        Returns:
            The logits (batch, kept, vocab) on every process, and the cache.

        Raises:
            UserError: for arguments that no single stage supports.
            ModelError: for a cache that does not hold keys and values.
        """
        if refused := [name for name in FULL_MODEL_ONLY if inputs.get(name) is not None and inputs[name] is not False]:
            raise UserError(
                f"generate: {name_some(refused)} is not available in a pipeline, of which every process holds a part",
                "leave it out, or use a mesh with pp = 1",
            )
        assert input_ids is not None
        use_cache = bool(inputs.get("use_cache"))
        if past_key_values is None and use_cache and "cache_params" not in inputs:
            past_key_values = _empty_cache(self.pipeline.stages[0].model)
        caches = self.caches.of(past_key_values, use_cache=use_cache)
        borders = ForwardMessages(
            self.pipeline.plan.pipeline, self.pipeline.peers, axis_size(self.pipeline.mesh, PP), sends_shapes=True
        )
        for stage, cache in zip(self.pipeline.stages, caches, strict=True):
            received: Sequence[Tensor] = ()
            if not stage.is_first:
                # Keys and values that layers share grow with the cache, so shapes are sent too.
                like = received_like(self.pipeline, stage, *input_ids.shape)
                received = borders.receive(stage.index, [torch.empty_like(it, device=input_ids.device) for it in like])
            cached = {} if cache is None else {"past_key_values": cache}
            output = stage.model(*received, input_ids=input_ids, **inputs, **cached)
            if not stage.is_last:
                borders.send(stage.index, output)
            if cache is not None:
                _count_elsewhere(cache, stage, input_ids)
            borders.end_stage()
        borders.wait()
        return CausalLMOutputWithPast(logits=self._share(output, input_ids), past_key_values=past_key_values)

    def _share(self, output: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of the last stage on every process."""
        pipeline = self.pipeline
        is_last = pipeline.stages[-1].is_last
        if is_last and pipeline.logits_are_sharded:
            vocabulary = pipeline.stages[-1].model.config.get_text_config().vocab_size
            output = gather_vocabulary(output, vocabulary, pipeline.mesh.get_group(TP))
        group = pipeline.mesh.get_group(PP)
        # The program may keep the logits of some positions only.
        shape = torch.tensor(output.shape if is_last else (0, 0, 0), device=ids.device)
        dist.broadcast(shape, group=group, group_src=self.owners[-1])
        logits = (
            output.contiguous() if is_last else torch.empty(*shape.tolist(), dtype=self._format(), device=ids.device)
        )
        dist.broadcast(logits, group=group, group_src=self.owners[-1])
        return logits

    def _format(self) -> torch.dtype:
        return getattr(torch, self.pipeline.plan.precision.activations)


class _StageCaches:
    """One cache for each stage of this process, made from the cache of `generate`.

    Several stages cannot share a cache. Masks and positions are made from the length of the first
    layers, which a forward pass of one stage changes before that of the next. The cache of
    `generate` holds the layers of all of them. So what it does to its layers (reorder beams, crop)
    is done to all.
    """

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self.full: Cache | None = None
        self.parts: list[Cache] = []

    def of(self, full: Cache | None, *, use_cache: bool) -> list[Cache] | list[None]:
        if full is None:
            if use_cache:
                kind = type(self.stages[0].model).__name__
                raise _refusal(kind, "a cache of its own")
            return [None] * len(self.stages)
        if full is not self.full:
            self.full, self.parts = full, self._split(full)
        return self.parts

    def _split(self, full: Cache) -> list[Cache]:
        num_layers = len(self.stages[0].layers)
        if full.layer_class_to_replicate is not None:
            full.layers += [full.layer_class_to_replicate() for _ in range(num_layers - len(full.layers))]
        others = sorted({type(layer).__name__ for layer in full.layers if type(layer) not in KEYS_AND_VALUES})
        if others:
            raise _refusal(type(self.stages[0].model).__name__, name_some(others))
        if len(full.layers) == num_layers:
            empty = copy.deepcopy(full.layers)
            for _ in self.stages[1:]:
                full.layers += copy.deepcopy(empty)
        parts = []
        for index in range(len(self.stages)):
            part = copy.copy(full)
            part.layers = full.layers[index * num_layers : (index + 1) * num_layers]
            parts.append(part)
        return parts


def _empty_cache(model: Any) -> Cache | None:
    """Return an empty cache for a model that has dropped the cache of `generate`.

    Phi-3 does so when its frequencies change. A model that keeps anything but keys and values was
    given no cache, and gets none here.
    """
    return DynamicCache(config=model.config.get_text_config()) if keeps_keys_and_values(model) else None


def _refusal(model: str, what: str) -> ModelError:
    return ModelError(
        f"generate: {model} keeps {what}, and only keys and values (of all positions or of a window) can be kept on "
        "several stages",
        "pass use_cache=False, or use a mesh with pp = 1",
    )


def _count_elsewhere(cache: Cache, stage: Stage, input_ids: Tensor) -> None:
    """Extend the layers of other stages by the new tokens.

    A forward pass reads the length of the sequence from the first layers.
    """
    empty = input_ids.new_zeros((), dtype=stage.model.dtype).expand(input_ids.shape[0], 1, input_ids.shape[1], 1)
    for index, layer in enumerate(cache.layers):
        if not stage.first_layer <= index < stage.last_layer:
            layer.update(empty, empty)  # type: ignore[union-attr]
