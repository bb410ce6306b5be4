"""Continue prompts with an exported model or a checkpoint, on any mesh."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ConfigError, ModelError, UserError, name_some
from meshtrain.inference.generation import generate_on_mesh
from meshtrain.inference.loading import ModelSource, find_model_source, pipeline_from
from meshtrain.models.refusals import refusal_reason
from meshtrain.models.rotary import most_positions
from meshtrain.runtime.environment import world_size_from_environment
from meshtrain.runtime.process import check_devices, process_group


@dataclass(frozen=True)
class Decoding:
    """How a text is continued.

    Attributes:
        max_new_tokens: number of tokens to add, unless the model ends the text earlier.
        temperature: 0 takes the likeliest token each time; higher values draw more freely. None: 0
            with beams, otherwise 0.8.
        top_k: draw among this number of the likeliest tokens; 0: among all.
        top_p: draw among the likeliest tokens that have this probability together.
        num_beams: follow this number of the likeliest texts, and return the best.
        seed: seed of the draws.
    """

    max_new_tokens: int
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    num_beams: int = 1
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the arguments for transformers' `generate`.

        Raises:
            UserError: for draws together with beams, or for `top_k` or `top_p` without draws.
        """
        temperature = (0.8 if self.num_beams == 1 else 0.0) if self.temperature is None else self.temperature
        if temperature > 0 and self.num_beams > 1:
            raise UserError(
                f"--num-beams {self.num_beams} follows the likeliest texts, and --temperature {temperature} draws",
                "leave one of them out",
            )
        common = {"max_new_tokens": self.max_new_tokens, "num_beams": self.num_beams, "use_cache": True}
        if temperature > 0:
            draws = {"do_sample": True, "temperature": temperature, "top_k": self.top_k, "top_p": self.top_p}
            return common | draws
        if self.top_k or self.top_p < 1:
            raise UserError(
                "--top-k and --top-p limit the tokens to draw from, and without a temperature no token is drawn",
                "leave them out, or set --temperature (and no --num-beams)",
            )
        return common | {"do_sample": False}


def generate_texts(
    source: str, prompts: Sequence[str], decoding: Decoding, plan: ParallelPlan | None = None
) -> list[str]:
    """Continue prompts. Collective over the processes that torchrun started.

    Args:
        source: the output of `meshtrain export`, or any local Hugging Face model; or a checkpoint,
            or a run directory, of which the newest checkpoint is used; may be a URL.
        prompts: the beginnings of the texts; several are continued side by side.
        decoding: how the texts are continued.
        plan: how the model is laid out on the processes; None: there is one process.

    Returns:
        Each prompt with its continuation, the same on all processes.

    Raises:
        ModelError: if there is no complete model.
        CheckpointError: if the checkpoint cannot be read.
        PlanError: if the plan does not fit the model or the number of processes.
        UserError: if a prompt is empty or too long for the model, or the settings contradict each
            other.
    """
    options, world_size = decoding.options(), world_size_from_environment()
    if not all(prompts):
        raise UserError("the prompt is empty", "pass the words that the text begins with")
    if plan is None and world_size > 1:
        raise ConfigError(
            f"{world_size} processes are started, but there is no plan for them",
            f"add mesh.tp={world_size} (or mesh.pp={world_size}), or --plan FILE, or start one process",
        )
    with ExitStack() as stack:
        found = find_model_source(source, stack)
        if plan is None and not found.is_checkpoint:
            tokenizer, model = _stock(found)
            batch = encode(tokenizer, prompts, str(found), model.config, decoding.max_new_tokens)
            return write_texts(tokenizer, model.generate, batch, options, model.device, decoding.seed)
        check_devices()
        tokenizer, config = found.tokenizer(), found.config()
        batch = encode(tokenizer, prompts, str(found), config, decoding.max_new_tokens)
        device = stack.enter_context(process_group())
        pipeline = pipeline_from(found, config, plan or ParallelPlan(), device)

        def generate(ids: Tensor, **given: Any) -> Tensor:
            return generate_on_mesh(pipeline, ids, **given)

        return write_texts(tokenizer, generate, batch, options, device, decoding.seed)


def _stock(found: ModelSource) -> tuple[Any, Any]:
    """Load tokenizer and model with transformers alone."""
    # The progress bar would appear between the command and the text, even in a file.
    had_bar = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.directory)
        loaded: Any = _auto_class(found).from_pretrained(found.directory, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{found} does not hold a complete model with its tokenizer: {refusal_reason(error)}", "export it again"
        ) from error
    finally:
        if had_bar:
            enable_progress_bar()
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers fills them with random values, and the text would be nonsense.
        raise ModelError(
            f"{found} lacks weights of the model ({len(missing)}): {name_some(missing)}",
            "use a folder that has them all",
        )
    device: Any = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tokenizer, model.to(device)


def _auto_class(found: ModelSource) -> Any:
    """Return the Auto class that loads a folder: that of some multimodal types is another."""
    kind = type(AutoConfig.from_pretrained(found.directory))
    is_multimodal = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM


def encode(
    tokenizer: Any, prompts: Sequence[str], where: str, config: PretrainedConfig, max_new_tokens: int
) -> dict[str, Tensor]:
    """Return the tokens and the mask of the prompts, left-padded: (prompts, seq) each.

    Args:
        tokenizer: of transformers.
        prompts: not empty.
        where: what messages call the folder of the tokenizer.
        config: of the model.
        max_new_tokens: number of tokens that follow a prompt.

    Raises:
        ModelError: for a tokenizer that makes no tokens.
        UserError: for more tokens than the model has positions.
    """
    rows: list[list[int]] = [tokenizer(prompt).input_ids for prompt in prompts]
    if not all(rows):
        # transformers makes a tokenizer without a vocabulary if the files are missing.
        raise ModelError(f"the tokenizer in {where} turns the prompt into no tokens", "check that its files are there")
    width, limit = max(map(len, rows)), most_positions(config)
    if limit is not None and width + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {width} tokens with {max_new_tokens} more is asked for, but the model has {limit} positions",
            f"ask for at most {max(limit - width, 0)} or shorten the prompt",
        )
    padding = _padding(tokenizer)
    return {
        "ids": torch.tensor([[padding] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def _padding(tokenizer: Any) -> int:
    # The mask hides the padding, so any token would do.
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in known if token is not None)


def write_texts(
    tokenizer: Any,
    generate: Callable[..., Tensor],
    batch: dict[str, Tensor],
    options: dict[str, Any],
    device: torch.device,
    seed: int,
) -> list[str]:
    """Return prompts with their continuations. The random states stay as they are.

    Args:
        tokenizer: of transformers.
        generate: takes token ids and the arguments of transformers' `generate`.
        batch: as `encode` returns it.
        options: arguments of `generate`.
        device: that computes.
        seed: of the draws.
    """
    ids, mask = batch["ids"].to(device), batch["attention_mask"].to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = generate(ids, attention_mask=mask, pad_token_id=_padding(tokenizer), **options)
    texts = []
    for row, hidden in zip(output.tolist(), (mask == 0).sum(dim=1).tolist(), strict=True):
        texts.append(str(tokenizer.decode(row[hidden:], skip_special_tokens=True)))
    return texts
