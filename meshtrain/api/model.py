"""Text generation, and how a parallel model without a pipeline differs from the stock model."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtrain.api.arguments import check_tokenizer, new_folder
from meshtrain.api.calls import Calls
from meshtrain.api.gradients import GradientCompletion
from meshtrain.api.handle import ATTRIBUTE, Handle, handle_of, pipeline_of
from meshtrain.api.saving import save_parallelized, save_pretrained, without_stock_keywords
from meshtrain.checkpoint.huggingface.adapters import save_adapters
from meshtrain.checkpoint.huggingface.description import Tokenizer
from meshtrain.compat.nn import Unmovable, mix_in
from meshtrain.compat.peft import replace_methods
from meshtrain.config.mesh import DATA_AXES
from meshtrain.errors import ModelError
from meshtrain.inference.generation import check_prompts, generate_on_mesh
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import reshard
from meshtrain.runtime.mesh import axis_size, data_rank

OF_PEFT = ("tokenizer", "selected_adapters", "path_initial_model_for_weight_conversion")


def generate(model: Any, inputs: Tensor | None = None, **options: Any) -> Any:
    """Generate text with a parallel model, as transformers' `generate` does. Collective.

    Every process of the program calls it. It computes in evaluation mode, with a cache of keys and
    values for each stage. It is the same as `model.generate(inputs, **options)`.

    Args:
        model: what `parallelize` returned, or an adapter of peft around it; in a hook
            `state.model`.
        inputs: token ids (batch, seq), left-padded where their lengths differ. Processes that share
            a model (its pp, cp and tp axes) pass the same ids, and draw what the first of them
            would draw alone. Other dp ranks may pass other prompts, of other shapes.
        options: what transformers' `generate` takes: `attention_mask` (batch, seq),
            `max_new_tokens`, `do_sample`, `num_beams`, a `generation_config`, stopping criteria
            (which must decide alike on the processes of one model) and so on. A `streamer` may be
            passed on one process alone.

    Returns:
        Token ids (batch, seq + new tokens), the same as those of the stock model, on every process;
        or, with `return_dict_in_generate`, what else transformers' `generate` returns.

    Raises:
        ModelError: if the parameters have no values yet; under a pipeline also for a model whose
            cache holds something other than keys and values.
        UserError: if processes of one model pass different things, prompts without tokens, or
            `max_time`, which would stop each by its own clock; under a pipeline also for
            attentions, hidden states and input embeddings, which no process has in full.

    Source: transformers.GenerationMixin.generate, which runs on every process.
    """
    handle = handle_of(model)
    handle.check_values()
    if inputs is not None:
        check_prompts("generate: inputs", inputs)
        inputs = inputs.to(handle.device)
    if isinstance(model, Pipeline):
        # The model of a run, as its hooks receive it.
        return generate_on_mesh(model, inputs, **options)
    return model.generate(inputs, **options)


class ParallelModel(Unmovable):
    """Mixed into the class of a parallel model.

    It refuses what would break the model, and saves the tensors of all ranks.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or fill them with zeros."""
        # While FSDP2 has parameters gathered, these replace the parameters that have the gradients.
        model: Any = self
        reshard(model)
        stock: Any = super()
        stock.zero_grad(set_to_none)

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Any:
        """Generate as the stock model does; see `meshtrain.generate`. Collective."""
        stock: Any = super()
        if generation_config is not None:
            options["generation_config"] = generation_config
        handle = handle_of(self)
        handle.is_generating = True
        try:
            return generate_on_mesh(handle.pipeline, inputs, stock=stock.generate, **options)
        finally:
            handle.is_generating = False

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Call `meshtrain.save_pretrained`. Collective.

        The stock method would save only this rank's part.
        """
        save_pretrained(self, save_directory, **without_stock_keywords(kwargs))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the `state_dict()` of a model with the same plan; full tensors are refused.

        Raises:
            ModelError: if there are full tensors where this rank keeps shards.
        """
        model: Any = self
        for name, parameter in model.named_parameters():
            value = state_dict.get(name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                raise ModelError(
                    f"load_state_dict: {name} is a full tensor, and every rank of this model keeps a shard of it",
                    "load it into the stock model before meshtrain.parallelize, or call meshtrain.load_weights(model, "
                    "folder); meshtrain.load_checkpoint(directory, state) resumes a training",
                )
        stock: Any = super()
        return stock.load_state_dict(state_dict, *args, **kwargs)

    def save_parallelized(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Call `meshtrain.save_parallelized`. Collective."""
        save_parallelized(self, save_directory, **kwargs)

    @property
    def data_rank(self) -> int:
        """The part of every global batch that this rank reads: 0 to `num_data_ranks` - 1."""
        return data_rank(pipeline_of(self).mesh)

    @property
    def num_data_ranks(self) -> int:
        """The number of parts in which a global batch is read."""
        return axis_size(pipeline_of(self).mesh, *DATA_AXES)

    def check_move(self, change: Callable[[Tensor], Tensor]) -> None:
        """Refuse to be moved or cast, directly or with a module around the model (PeftModel).

        Raises:
            ModelError: if `change` moves or casts.
        """
        model: Any = self
        before = torch.empty(0, dtype=model.dtype, device=handle_of(self).device)
        after = change(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise ModelError(
                f"a parallel model cannot be moved (to {after.device}, {after.dtype}): every rank keeps its shards on "
                "its own device, the GPU of its LOCAL_RANK where there are any",
                "leave the call out, and choose number formats with model.to(...) before meshtrain.parallelize or in "
                "[precision] of the plan",
            )

    @property
    def peft_config(self) -> Any:
        """The configurations of the LoRA adapters that the model had when it became parallel.

        Raises:
            ModelError: if it had none: peft reads them before it adapts a model, and a parallel
                model cannot be adapted.
        """
        configs = vars(self).get("peft_config")
        if configs is None:
            _refuse_adapters()
        return configs

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        _refuse_adapters()

    def __deepcopy__(self, memo: object) -> NoReturn:
        handle_of(self).__deepcopy__(memo)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to resize: the rows are stored on several processes, with their optimizer states.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "the embeddings of a parallel model cannot be resized",
            "call model.resize_token_embeddings(...) before meshtrain.parallelize, or meshtrain.load_weights(model, "
            "folder, enlarge_vocabulary=True) for one on meta",
        )


def make_adapted(model: Any, pipeline: Pipeline) -> None:
    """Let a PeftModel around a parallel model save from all ranks, and refuse to load into it."""
    save = partial(_save_adapters, model, pipeline)
    # peft skips what it does not find, such as B of a fused projection, which is stored in parts.
    replace_methods(model, save_pretrained=save, load_adapter=_refuse_loading, load_state_dict=_refuse_loading)


def _save_adapters(
    model: Any, pipeline: Pipeline, save_directory: str | Path, *, tokenizer: Tokenizer = None, **kwargs: Any
) -> None:
    if "merge_adapters" in kwargs:
        save_pretrained(model, save_directory, tokenizer=tokenizer, **without_stock_keywords(kwargs))
        return
    folder = new_folder("save_pretrained: save_directory", save_directory)
    check_tokenizer("save_pretrained: tokenizer", tokenizer)
    save_adapters(model, pipeline, folder, tokenizer=tokenizer, **without_stock_keywords(kwargs, OF_PEFT))


def _refuse_adapters() -> NoReturn:
    raise ModelError(
        "peft cannot adapt a parallel model, whose projections are cut",
        "adapt the stock model first: meshtrain.parallelize(peft.get_peft_model(model, config), plan)",
    )


def _refuse_loading(*args: object, **kwargs: object) -> NoReturn:
    raise ModelError(
        "adapters cannot be loaded into a parallel model, whose parameters are cut",
        "load them before: meshtrain.parallelize(peft.PeftModel.from_pretrained(model, folder, is_trainable=True), "
        "plan); meshtrain.load_checkpoint resumes a training",
    )


def make_parallel(model: PreTrainedModel, handle: Handle, gradients: GradientCompletion) -> None:
    """Give a model that `meshtrain.parallel.parallelize` has cut its stock interface."""
    vars(model)[ATTRIBUTE] = handle
    mix_in(model, ParallelModel, __module__=type(model).__module__)
    Calls(model, handle, gradients).watch()
