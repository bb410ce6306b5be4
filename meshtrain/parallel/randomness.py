"""Random streams without state: every draw is a function of (seed, step, microbatch, stage, data rank).

A resumed run draws what the uninterrupted one draws, with nothing saved. Processes of one tp group share a stream, so
that dropout on replicated activations is the same on all of them; where activations are sharded (attention heads, parts
of the sequence) each takes a stream of its own, derived from the shared one. Seeding by rank would make replicated
weights drift apart, silently.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def stream_key(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ForwardStreams:
    """Seeds torch's generators at the start of every forward pass of a stage.

    Args:
        seed: of the run.
        data_rank: which part of the global batch this process reads.
    """

    def __init__(self, seed: int, data_rank: int) -> None:
        self.seed, self.data_rank = seed, data_rank
        self.step = 0
        self.microbatches: dict[int, int] = {}

    def begin_step(self, step: int) -> None:
        """Forget the microbatches of the step before."""
        self.step = step
        self.microbatches.clear()

    def watch(self, model: nn.Module, stage: int) -> None:
        """Seed before each training forward of `model`; schedules run the microbatches of a stage in order."""

        def seed_forward(module: nn.Module, _: Any) -> None:
            if module.training:
                microbatch = self.microbatches.get(stage, 0)
                self.microbatches[stage] = microbatch + 1
                torch.manual_seed(stream_key(self.seed, self.step, microbatch, stage, self.data_rank))

        model.register_forward_pre_hook(seed_forward)


def draw_key() -> int:
    """Draw a number from the stream that the tp group shares; all its processes must do so at the same place."""
    return int(torch.randint(2**62, ()))


@contextmanager
def own_stream(coordinate: int) -> Iterator[None]:
    """Give the block a stream of its own per coordinate; afterwards the shared stream goes on, equal on all processes.

    A recomputation replays it: checkpointing restores the shared stream, and the key is drawn from that.
    """
    key = draw_key()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    torch.manual_seed(stream_key(key, coordinate))
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def has_dropout(model: PreTrainedModel) -> bool:
    """Return whether anything random happens in training, as far as configuration and modules say."""
    values = model.config.get_text_config().to_dict().items()
    # Routers add noise to what they see ("jitter").
    names = [name for name, value in values if isinstance(value, float) and value > 0]
    return any("drop" in name or "jitter" in name for name in names) or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )


def attention_dropout(model: PreTrainedModel) -> dict[str, float]:
    """Return the values of the configuration that drop attention probabilities."""
    config = model.config.get_text_config()
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    # MPT keeps its value one table deeper.
    tables = {"": config, "attn_config.": getattr(config, "attn_config", None)}
    values = {f"{prefix}{name}": getattr(table, name, 0.0) for prefix, table in tables.items() for name in names}
    return {name: value for name, value in values.items() if value}


def separate_head_streams(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Let the dropout of attention probabilities differ between the heads of different processes.

    The attention interface of transformers is the door: the model's own forward stays as it is. Without dropout on the
    probabilities nothing is changed.
    """
    if not attention_dropout(model):
        return
    base = model.config.get_text_config()._attn_implementation
    name = f"meshtrain_{base}_{group.rank()}_of_{group.size()}"
    AttentionInterface.register(name, torch.compiler.disable(partial(_attend, base, group.rank())))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    model.set_attn_implementation(name)


def _attend(base: str, coordinate: int, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    # The eager function is not registered: every modelling file has its own.
    eager: Callable[..., Any] = vars(sys.modules[type(module).__module__]).get("eager_attention_forward", _no_eager)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)
    if not kwargs.get("dropout"):
        return attention(module, *args, **kwargs)
    with own_stream(coordinate):
        return attention(module, *args, **kwargs)


def _no_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    raise AssertionError(f"{type(module).__name__} has no eager attention")
