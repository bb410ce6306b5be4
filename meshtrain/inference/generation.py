"""Generate text from a model that is distributed over a mesh."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.config.arguments import wrong
from meshtrain.config.mesh import FSDP_AXES, MODEL_AXES, TP
from meshtrain.errors import UserError
from meshtrain.inference.agreement import agree
from meshtrain.inference.pipelined import as_one_model
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import reshard
from meshtrain.parallel.tensor.collectives import gather_vocabulary
from meshtrain.parallel.tokens import check_tokens
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
    models = [stage.model for stage in pipeline.stages]
    _check(pipeline, inputs, options)
    # The streamer is not compared: one process alone may show the text while it is generated.
    given = {name: value for name, value in options.items() if name != "streamer"}
    agree(pipeline.mesh, {"inputs": inputs, **given}, torch.device(pipeline.mesh.device_type))
    if axis_size(pipeline.mesh, *FSDP_AXES) > 1:
        # All gather each other's shards at every forward pass, so all must run the same number.
        options.setdefault("synced_gpus", True)
    with _at_rest(models), ExitStack() as stack:
        if pipeline.plan.compile.enabled or pipeline.mesh.device_type == "cuda":
            # A layer would be compiled again for every token, because the length of the cache
            # changes. And what transformers compiles by itself, for a cache of a fixed length,
            # contains messages between processes.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if pipeline.num_stages == 1 and pipeline.logits_are_sharded:
            stack.callback(models[0].register_forward_hook(partial(_join_logits, pipeline)).remove)
        model: Any = as_one_model(pipeline) if pipeline.num_stages > 1 else models[0]
        return (stock or model.generate)(inputs, **options)


def _join_logits(pipeline: Pipeline, model: Any, args: object, output: Any) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    output.logits = gather_vocabulary(output.logits, vocabulary, pipeline.mesh.get_group(TP))


def _check(pipeline: Pipeline, inputs: Tensor | None, options: dict[str, Any]) -> None:
    ids = options.get("input_ids") if inputs is None else inputs
    if ids is not None:
        check_prompts("generate: inputs", ids)
    if ids is not None and ids.numel() == 0:
        raise UserError(f"generate: the prompts {tuple(ids.shape)} have no tokens; begin with the one of bos_token_id")
    if ids is not None and (ids.dim() != 2 or ids.is_floating_point()):
        raise UserError(
            f"generate: the prompts are {tuple(ids.shape)} {str(ids.dtype).removeprefix('torch.')}; pass token ids "
            "(batch, seq), integers"
        )
    check_tokens(pipeline, ids)
    config = options.get("generation_config") or pipeline.stages[0].model.generation_config
    if pipeline.num_stages > 1 and options.get("guidance_scale", config.guidance_scale) not in (None, 1):
        raise UserError(
            "generate: guidance_scale calls the model a second time with a cache that no stage knows; leave it out, or "
            "use a mesh with pp = 1"
        )
    if options.get("max_time", config.max_time) is not None and axis_size(pipeline.mesh, *MODEL_AXES) > 1:
        raise UserError(
            "generate: by max_time every process would stop by a clock of its own, while the others of its model wait "
            "for it; leave it out, and set max_new_tokens"
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
