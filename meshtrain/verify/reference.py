"""Training of the stock model in one process, with torch alone: the reference for a plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.compat.transformers import named_function
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.config.run import STOCK_ROUTER, RouterConfig
from meshtrain.models.adapters import stock_name, without_adapters
from meshtrain.models.lora import adapted_model
from meshtrain.models.packed import pack, packable, packed_width, unpack
from meshtrain.models.saved_modules import let_train
from meshtrain.models.whole.causal_class import causal_class
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.verify.case import MICRO_BATCH_SIZE, OPTIMIZER, SEED, SEQUENCE, ProofCase, Trace, neighbor_of, with_noise
from meshtrain.verify.routers import WatchedRouters


def given_weights(case: ProofCase) -> dict[str, Tensor]:
    """Return the weights of transformers' own initialization, which serve as given weights."""
    return copy_weights(_build(case))


def train_stock(case: ProofCase, initial: dict[str, Tensor], *, neighbor: int | None = None) -> Trace:
    """Train the stock model for a few steps.

    Args:
        case: its plan is ignored.
        initial: stock FQN -> value, for every parameter; training starts from them with noise.
        neighbor: number of a neighbor of these weights to start from instead.
    """
    model = _build(case)
    weights = with_noise(initial)
    with float32_casts_lifted():
        copy_weights_into(model, weights if neighbor is None else neighbor_of(weights, neighbor))
        if case.lora.base == "nf4":
            with without_adapters(model):
                round_projections(model)
        layers = keep_outputs(dict(_named_layers(model)))
        trace = train_model(model, case.batches(), case.router, objective=case.objective)
    trace.initial = {} if case.pretrained else initial
    # The outputs of documents that run alone are not those of a microbatch.
    trace.layers = {} if case.rows == "separate" else layers
    return trace


def build_stock(
    hf_config: PretrainedConfig, *, attention: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the stock model in float64, initialized by transformers alike in every process."""
    # The ranks of a proof are new processes, in which the class of a language half is not made yet.
    causal_class(hf_config)
    torch.manual_seed(SEED)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        hf_config, dtype=torch.float64, attn_implementation=attention, trust_remote_code=trust_remote_code
    )
    widen(model)
    return model.train()


def copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return stock FQN -> value, for every parameter."""
    return {name: parameter.detach().clone() for name, parameter in _parameters(model)}


def copy_weights_into(model: PreTrainedModel, values: Mapping[str, Tensor]) -> None:
    """Copy values into the stock model.

    Args:
        model: of `build_stock`.
        values: as `copy_weights` returns them.
    """
    with torch.no_grad():
        for name, parameter in _parameters(model):
            parameter.copy_(values[name])


@torch.no_grad()
def round_projections(model: PreTrainedModel) -> None:
    """Replace the weights of frozen projections by the numbers that four bits keep of them.

    Args:
        model: without adapters.
    """
    for _, module in packable(model):
        packed = torch.empty(module.out_features, packed_width(module.in_features, torch.uint8), dtype=torch.uint8)
        pack(module.weight, packed)
        module.weight.copy_(unpack(packed, module.weight.dtype))


def train_model(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    router_config: RouterConfig = STOCK_ROUTER,
    optimizer: Optimizer | None = None,
    objective: ObjectiveConfig = STOCK_OBJECTIVE,
) -> Trace:
    """Train a stock model as it is, one step for each global batch.

    Args:
        model: of `build_stock`.
        batches: the global ones.
        router_config: how its routers are trained.
        optimizer: of its parameters; None: AdamW.
        objective: what training minimizes.
    """
    routers = WatchedRouters(model, router_config)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trace, optimizer = Trace(), optimizer or build_adamw(parameters)
    for batch in batches:
        optimizer.zero_grad()
        router_logits, logits = _run(model, batch)
        loss = _loss(logits, batch, objective, trace)
        trace.losses.append(loss.item())
        if router_logits:
            router = _router_loss(model, router_logits, batch)
            trace.router_losses.append(router.item())
            loss = loss + model.config.router_aux_loss_coef * router
        if router_config.z_loss:
            z_loss = routers.z_loss(batch)
            trace.router_z_losses.append(z_loss.item())
            loss = loss + router_config.z_loss * z_loss
        loss.backward()
        trace.gradients.append({n: p.grad.clone() for n, p in _parameters(model) if p.grad is not None})
        trace.norms.append(nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_gradient_norm).item())
        optimizer.step()
        routers.end_step(batch)
    trace.parameters, trace.biases = copy_weights(model), routers.buffers()
    with torch.no_grad():
        _, logits = _run(model.eval(), batches[0])
        trace.evaluation = _mean_cross_entropy(logits, batches[0]).item()
    return trace


def keep_outputs(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return a dict that receives the first output of each layer, cut to the first microbatch."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            if name not in outputs:
                hidden = output[0] if isinstance(output, (tuple, list)) else output
                # Hidden states that are not (batch, seq, hidden) do not have one row per sample.
                has_rows = hidden.dim() == 3 and (hidden.shape[0] != SEQUENCE or hidden.shape[1] == SEQUENCE)
                outputs[name] = hidden[:MICRO_BATCH_SIZE].detach().clone() if has_rows else hidden.new_empty(0, 0)

        return hook

    for name, layer in layers.items():
        layer.register_forward_hook(keep(name))
    return outputs


def widen(model: PreTrainedModel) -> None:
    """Cast parameters to float64 that a model always keeps in float32 (routers), but no buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)


def build_adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """Build AdamW with weight decay for matrices only."""
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    return torch.optim.AdamW(groups, lr=OPTIMIZER.learning_rate, betas=betas, eps=OPTIMIZER.epsilon)


def _build(case: ProofCase) -> PreTrainedModel:
    model = build_stock(case.hf_config, attention=case.attention, trust_remote_code=case.trust_remote_code)
    if case.lora.rank is not None:
        adapted_model(model, case.lora, device="cpu")
        let_train(model, case.lora.modules_to_save, torch.float64)
        widen(model)
    return model


def _parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter once, with its name in the model without adapters.

    A tied one has the name of its original, also where the head is registered first.
    """
    for adapted_name, parameter in model.named_parameters():
        name = stock_name(adapted_name)
        yield model.all_tied_weights_keys.get(name, name), parameter


def _named_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    name, layers = find_layers(model)
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def _run(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the logits of each router, (tokens, experts), if any, and (tokens, vocabulary)."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "position_ids")}
    parts = _documents(batch) if "position_ids" in batch else [inputs]
    outputs = [model(**part, use_cache=False) for part in parts]
    logits = torch.cat([output.logits.flatten(0, 1) for output in outputs])
    routers = zip(*(output.get("router_logits") or () for output in outputs), strict=True)
    return [torch.cat(router) for router in routers], logits


def _mean_cross_entropy(logits: Tensor, batch: dict[str, Tensor], smoothing: float = 0.0) -> Tensor:
    labels = batch["labels"].flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum", label_smoothing=smoothing)
    return total / (labels != -100).sum()


def _loss(logits: Tensor, batch: dict[str, Tensor], objective: ObjectiveConfig, trace: Trace) -> Tensor:
    """Return the () loss of a step, and note its terms if it has other ones than cross-entropy."""
    loss = _mean_cross_entropy(logits, batch, objective.label_smoothing)
    if objective == STOCK_OBJECTIVE:
        return loss
    trace.cross_entropies.append(_mean_cross_entropy(logits.detach(), batch).item())
    if objective.z_loss:
        z_loss = logits[batch["labels"].flatten() != -100].logsumexp(-1).square().mean()
        trace.z_losses.append(z_loss.item())
        loss = loss + objective.z_loss * z_loss
    return loss


def _documents(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield each document of a batch alone, as it would be without the others."""
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        lengths = torch.diff(torch.cat([(positions == 0).nonzero().flatten(), torch.tensor([len(ids)])])).tolist()
        yield from ({"input_ids": document[None]} for document in ids.split(lengths))


def _router_loss(model: PreTrainedModel, router_logits: Sequence[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of the model's own auxiliary loss over its routers and over microbatches."""
    function = named_function(model, "load_balancing_loss_func")
    assert function is not None, "the model has no auxiliary loss"
    samples, length = batch["input_ids"].shape
    masks = batch.get("attention_mask", torch.ones(samples, length, dtype=torch.long)).split(MICRO_BATCH_SIZE)
    losses = [
        function((part,), model.num_experts, model.num_experts_per_tok, mask)
        for logits in router_logits
        for part, mask in zip(logits.split(MICRO_BATCH_SIZE * length), masks, strict=True)
    ]
    return torch.stack(losses).mean()
