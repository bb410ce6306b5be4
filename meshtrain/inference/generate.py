"""Text from an exported model, with stock transformers: what anybody else would get from it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from meshtrain.checkpoint.directory import find_checkpoint
from meshtrain.errors import CheckpointError, ModelError, UserError


def generate_text(folder: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int) -> str:
    """Continue a prompt.

    Args:
        folder: what `meshtrain export` wrote, or any local Hugging Face model.
        prompt: how the text begins.
        max_new_tokens: how far it goes on, unless the model ends it earlier.
        temperature: 0 takes the likeliest token each time; higher draws more freely.
        seed: of the draws.

    Returns:
        The prompt and its continuation.

    Raises:
        ModelError: if there is no whole exported model in `folder`.
        UserError: if the prompt is empty, or too long for the model.
    """
    _check_folder(folder)
    if not prompt:
        raise UserError("the prompt is empty; give the words that the text begins with")
    # Its bar would stand between the command and the text, even in a file.
    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{folder} holds no whole model with its tokenizer: {reason}; export it again") from error
    finally:
        enable_progress_bar()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        # transformers makes a tokenizer without a vocabulary where the files are missing.
        raise ModelError(f"the tokenizer in {folder} turns the prompt into no tokens; are its files there?")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)  # type: ignore[arg-type]  # `to` is wrapped in a way that hides its signature
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + max_new_tokens > limit:
        raise UserError(
            f"the prompt has {ids.shape[1]} tokens and {max_new_tokens} more are asked for, but the model has {limit} "
            f"positions; ask for at most {max(limit - ids.shape[1], 0)} or shorten the prompt"
        )
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(  # type: ignore[misc]  # its own annotation of `self` excludes the auto class
            ids.to(device),
            attention_mask=torch.ones_like(ids, device=device),
            max_new_tokens=max_new_tokens,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    try:
        checkpoint = find_checkpoint(folder)
    except CheckpointError:
        raise ModelError(
            f"{folder} holds no exported model (no config.json); run `meshtrain export CHECKPOINT FOLDER` first"
        ) from None
    raise ModelError(
        f"{folder} holds a meshtrain checkpoint, not an exported model; "
        f"run `meshtrain export {checkpoint} FOLDER` first"
    )
