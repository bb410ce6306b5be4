"""Generate text from a model that is distributed over a mesh."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig

from meshtrain.config.arguments import wrong
from meshtrain.config.mesh import FSDP_AXES, MODEL_AXES, TP
from meshtrain.errors import UserError, name_some
from meshtrain.inference.pipelined import as_one_model
from meshtrain.models.dtypes import dtype_name
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.randomness import get_random_states, set_random_states
from meshtrain.parallel.shard import reshard
from meshtrain.parallel.tensor.collectives import gather_vocabulary
from meshtrain.parallel.tokens import check_tokens
from meshtrain.runtime.agreement import gather_objects
from meshtrain.runtime.digest import tensor_digest
from meshtrain.runtime.mesh import axis_size


@torch.no_grad()
def generate_on_mesh(
    pipeline: Pipeline,
    inputs: Tensor | None = None,
    *,
    stock: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Generate from a parallel model with transformers, in evaluation mode. Collective.

    All processes must call it.

    Args:
        pipeline: with one stage or several.
        inputs: token ids (batch, seq), left-padded, the same on all processes of one model (its tp
            and pp axes); those that differ on a dp axis may have other prompts, of other shapes.
        stock: the model's own `generate`, if this function has replaced it.
        options: arguments of transformers' `generate`, such as `attention_mask` (batch, seq); a
            `streamer` may be passed on one process only.

    Returns:
        The result of transformers' `generate`, the same on all processes of one model: token ids
        (batch, seq + new).

    Raises:
        UserError: if the processes of one model got different arguments, if the prompts have no
            tokens, or for `max_time` or an option that a pipeline does not support.
        DataError: for tokens that the model does not know.
        ModelError: under a pipeline, for a cache that holds anything but keys and values.
    """
    _check(pipeline, inputs, options)
    # The streamer is not compared: one process alone may show the text while it is generated.
    given = {name: value for name, value in options.items() if name != "streamer"}
    _agree(pipeline.mesh, {"inputs": inputs, **given}, torch.device(pipeline.mesh.device_type))
    if axis_size(pipeline.mesh, *FSDP_AXES) > 1:
        # All gather each other's shards at every forward pass, so all must run the same number.
        options.setdefault("synced_gpus", True)
    with _as_one(pipeline) as model:
        return (stock or model.generate)(inputs, **options)


@torch.no_grad()
def logits_on_mesh(pipeline: Pipeline, ids: Tensor) -> Tensor:
    """Return the logits of a parallel model, in evaluation mode. Collective.

    Args:
        pipeline: with one stage or several.
        ids: token ids (batch, seq), the same on all processes of one model.

    Returns:
        (batch, seq, vocab), the same on all processes of one model.
    """
    with _as_one(pipeline) as model:
        return model(input_ids=ids, use_cache=False).logits


@contextmanager
def _as_one(pipeline: Pipeline) -> Iterator[Any]:
    """Yield a model in evaluation mode that has full logits on all processes."""
    models = [stage.model for stage in pipeline.stages]
    with _at_rest(models), ExitStack() as stack:
        if pipeline.context is not None:
            # A text grows by single tokens.
            stack.enter_context(pipeline.context.in_full())
        if pipeline.plan.compile.enabled or pipeline.mesh.device_type == "cuda":
            # A layer would be compiled again for every token, because the length of the cache
            # changes. And what transformers compiles by itself, for a cache of a fixed length,
            # contains messages between processes.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if pipeline.num_stages == 1 and pipeline.logits_are_sharded:
            stack.callback(models[0].register_forward_hook(partial(_join_logits, pipeline)).remove)
        yield as_one_model(pipeline) if pipeline.num_stages > 1 else models[0]


def _join_logits(pipeline: Pipeline, model: Any, args: object, output: Any) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    output.logits = gather_vocabulary(output.logits, vocabulary, pipeline.mesh.get_group(TP))


def _check(pipeline: Pipeline, inputs: Tensor | None, options: dict[str, Any]) -> None:
    ids = options.get("input_ids") if inputs is None else inputs
    if ids is not None:
        check_prompts("generate: inputs", ids)
    if ids is not None and ids.numel() == 0:
        raise UserError(f"generate: the prompts {tuple(ids.shape)} have no tokens", "begin them with bos_token_id")
    if ids is not None and (ids.dim() != 2 or ids.is_floating_point()):
        raise UserError(
            f"generate: the prompts are {tuple(ids.shape)} {dtype_name(ids.dtype)}",
            "pass token ids (batch, seq), integers",
        )
    check_tokens(pipeline, ids)
    config = options.get("generation_config") or pipeline.stages[0].model.generation_config
    if pipeline.num_stages > 1 and options.get("guidance_scale", config.guidance_scale) not in (None, 1):
        raise UserError(
            "generate: guidance_scale calls the model a second time with a cache that no stage knows",
            "leave it out, or use a mesh with pp = 1",
        )
    if options.get("max_time", config.max_time) is not None and axis_size(pipeline.mesh, *MODEL_AXES) > 1:
        raise UserError(
            "generate: with max_time every process would stop by its own clock, while the others of its model wait "
            "for it",
            "leave it out, and set max_new_tokens",
        )


def check_prompts(asked: str, prompts: object) -> None:
    """Check that prompts are encoded.

    Raises:
        UserError: if they are not.
    """
    if not isinstance(prompts, Tensor):
        wanted = 'token ids (batch, seq) in a tensor, such as tokenizer(["text"], return_tensors="pt").input_ids'
        raise wrong(asked, prompts, wanted, UserError)


@contextmanager
def _at_rest(models: list[Any]) -> Iterator[None]:
    """Switch the models to evaluation mode; afterwards restore their modes and reshard them."""
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for model in models:
            reshard(model)


def _agree(mesh: DeviceMesh, given: Mapping[str, Any], device: torch.device) -> None:
    """Check that the processes of one model got the same arguments, and let them draw alike.

    All of them take over the random state of the first. Collective.

    Args:
        mesh: all processes; those that differ on dp axes only may have other texts.
        given: name -> argument of `generate`.
        device: the device on which the model computes.

    Raises:
        UserError: on all processes of the model, if their arguments differ.
    """
    states = get_random_states()
    if device.type == "cpu":
        # A process that does not use CUDA must not start it for the state of another.
        states = states._replace(cuda=None)
    answers = [(dist.get_rank(), {name: _digest(value) for name, value in given.items()}, states)]
    for axis in MODEL_AXES:
        if axis_size(mesh, axis) > 1:
            answers = [found for answer in gather_objects(answers, mesh.get_group(axis)) for found in answer]
    first, wanted, states = answers[0]
    others = [rank for rank, digests, _ in answers if digests != wanted]
    if others:
        different = {
            name
            for _, digests, _ in answers
            for name in digests.keys() | wanted.keys()
            if digests.get(name) != wanted.get(name)
        }
        raise UserError(
            f"generate: rank {first} and rank {name_some([*map(str, others)])} hold one model together, but received "
            f"different {name_some(sorted(different))}",
            "pass the same to all of them",
        )
    set_random_states(states)


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return tensor_digest(value)
    if isinstance(value, GenerationConfig):
        return value.to_json_string(use_diff=False)
    try:
        return json.dumps(value)
    except TypeError:
        # Objects of one class may still differ: the callbacks of transformers cannot be compared.
        return type(value).__name__
