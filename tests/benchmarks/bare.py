"""Hand-written PyTorch loops over the stock model: the speed limit for a trainer.

Each is what a careful engineer writes for this one layout and nothing else: no checkpoints, no
metrics, no plan.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

MICRO_BATCH = 2
CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SMALL = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
# Whether the decoder layers are compiled, each on its own.
COMPILE = {"layers": False}
Step = Callable[[Tensor, Tensor], float]


def stock_model() -> nn.Module:
    """Build the stock Llama with transformers' own initialization."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG, use_cache=False)).train()
    if COMPILE["layers"]:
        for layer in model.model.layers:
            layer.compile()
    return model


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Build the optimizer that both sides use."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def one_rank() -> Step:
    """One process, gradient accumulation."""
    model = stock_model()
    optimizer = build_optimizer(model)

    def step(ids: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, targets in zip(ids.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True):
            loss = loss_sum(model(input_ids=part).logits, targets) / labels.numel()
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def two_rank_ddp() -> Step:
    """DistributedDataParallel with no_sync for all but the last microbatch."""
    model = DistributedDataParallel(stock_model())
    optimizer = build_optimizer(model)

    def step(ids: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        parts = list(zip(_mine(ids).split(MICRO_BATCH), _mine(labels).split(MICRO_BATCH), strict=True))
        total = 0.0
        for number, (part, targets) in enumerate(parts, start=1):
            model.require_backward_grad_sync = number == len(parts)
            # DDP averages over ranks.
            loss = loss_sum(model(input_ids=part).logits, targets) / labels.numel() * dist.get_world_size()
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def two_rank_fsdp() -> Step:
    """FSDP2 per layer, gradients reduced with the last microbatch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = stock_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model)

    def step(ids: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        parts = list(zip(_mine(ids).split(MICRO_BATCH), _mine(labels).split(MICRO_BATCH), strict=True))
        total = 0.0
        for number, (part, targets) in enumerate(parts, start=1):
            model.set_requires_gradient_sync(number == len(parts))
            loss = loss_sum(model(input_ids=part).logits, targets) / labels.numel() * dist.get_world_size()
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


class _ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        width = logits.shape[-1]
        columns = labels - dist.get_rank() * width
        here = (columns >= 0) & (columns < width)
        columns = columns.masked_fill(~here, 0)
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        target = shifted.gather(-1, columns[:, None]).squeeze(-1).masked_fill(~here, 0.0)
        weights = shifted.exp_()
        sums = torch.stack([weights.sum(-1), target])
        dist.all_reduce(sums)
        weights /= sums[0][:, None]
        ctx.save_for_backward(weights, columns, here)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weights, columns, here = ctx.saved_tensors
        weights.scatter_add_(-1, columns[:, None], -here.to(weights.dtype)[:, None])
        return weights.mul_(gradient), None


def two_rank_tp() -> Step:
    """Megatron's cut with plain tensors.

    There are two all-reduces per layer and direction, and vocabulary-parallel ends.
    """
    model: Any = stock_model()
    rank, size = dist.get_rank(), dist.get_world_size()

    def keep(module: nn.Module, dim: int) -> None:
        module.weight = nn.Parameter(module.weight.detach().chunk(size, dim)[rank].clone())  # type: ignore[union-attr, operator]

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (_ToShards.apply(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _ToShards.apply(kwargs["hidden_states"])}

    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            keep(getattr(layer.self_attn, name), 0)
        for name in ("gate_proj", "up_proj"):
            keep(getattr(layer.mlp, name), 0)
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            keep(module, 1)
            module.register_forward_hook(lambda _, args, output: _FromShards.apply(output))
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(enter, with_kwargs=True)
    keep(model.model.embed_tokens, 0)
    keep(model.lm_head, 0)
    rows = model.model.embed_tokens.weight.shape[0]

    def embed(input_ids: Tensor) -> Tensor:
        local = input_ids - rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), model.model.embed_tokens.weight)
        return _FromShards.apply(found.masked_fill(elsewhere[..., None], 0.0))

    model.model.embed_tokens.forward = embed
    model.lm_head.register_forward_pre_hook(lambda _, args: (_ToShards.apply(args[0]),))
    optimizer = build_optimizer(model)
    sharded = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    whole = [parameter for parameter in model.parameters() if parameter.dim() < 2]

    def step(ids: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        total = 0.0
        for part, targets in zip(ids.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True):
            logits = model(input_ids=part).logits
            loss = _VocabularyLoss.apply(logits.flatten(0, 1), targets.flatten()) / labels.numel()
            loss.backward()
            total += loss.item()
        squares = nn.utils.get_total_norm([parameter.grad for parameter in sharded]).square()
        dist.all_reduce(squares)
        norm = (squares + nn.utils.get_total_norm([parameter.grad for parameter in whole]).square()).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        return total

    return step


class _Half(nn.Module):
    """Half of the stock Llama, cut by hand."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        middle = len(model.model.layers) // 2
        self.layers = model.model.layers[:middle] if rank == 0 else model.model.layers[middle:]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if rank == 0 else None
        self.norm, self.head = (None, None) if rank == 0 else (model.model.norm, model.lm_head)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) if self.embedding is not None else x
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        return self.head(self.norm(hidden)) if self.head is not None and self.norm is not None else hidden


def two_rank_pp() -> Step:
    """torch's 1F1B over two hand-cut halves."""
    rank = dist.get_rank()
    half = _Half(stock_model(), rank)
    optimizer = build_optimizer(half)
    hidden = torch.empty(MICRO_BATCH, 512, CONFIG["hidden_size"], device="meta", requires_grad=True)
    ids_like = torch.empty(MICRO_BATCH, 512, dtype=torch.long, device="meta")
    inputs = (ids_like,) if rank == 0 else (hidden,)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), input_args=inputs, output_args=(hidden,))
    schedule: Any = None

    def step(ids: Tensor, labels: Tensor) -> float:
        nonlocal schedule
        if schedule is None:
            tokens = labels.numel()
            schedule = Schedule1F1B(
                stage, ids.shape[0] // MICRO_BATCH, loss_fn=lambda x, y: loss_sum(x, y) / tokens, scale_grads=False
            )
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        squares = nn.utils.get_total_norm([parameter.grad for parameter in half.parameters()]).square()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(half.parameters(), 1.0, squares.sqrt())
        optimizer.step()
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total.item()

    return step


def _mine(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


LAYOUTS: dict[str, tuple[Callable[[], Step], dict[str, int]]] = {
    "1 rank": (one_rank, {}),
    "dp_replicate 2": (two_rank_ddp, {"dp_replicate": 2}),
    "dp_shard 2": (two_rank_fsdp, {"dp_shard": 2}),
    "tp 2": (two_rank_tp, {"tp": 2}),
    "pp 2": (two_rank_pp, {"pp": 2}),
}
