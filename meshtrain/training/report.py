"""Resolve a run and print it: `meshtrain check`, `meshtrain plan`, and the head of every run."""

import inspect
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from meshtrain import console
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import dump_toml, plan_hash, with_family
from meshtrain.data.cache import Cache
from meshtrain.data.tokens.tokenizer import open_tokenizer
from meshtrain.errors import DataError, ModelError
from meshtrain.models.build import DTYPES, build_model, load_hf_config
from meshtrain.models.rotary import constant_length
from meshtrain.parallel.account import StageShare, account
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.runtime.environment import rank_from_environment, world_size_from_environment
from meshtrain.training.beginning import check_beginning
from meshtrain.training.directory import check_directory
from meshtrain.training.optim import build_learning_rate

# Stands in for a number of steps that is known only after the text is read.
ANY_NUMBER = 1_000_000


@dataclass(frozen=True)
class Resolved:
    """A run with every setting resolved.

    Attributes:
        hf_config: the Hugging Face configuration of the model.
        model: the stock model on the meta device.
        plan: the plan without -1, `auto`, `balanced` or `even`.
    """

    hf_config: PretrainedConfig
    model: PreTrainedModel
    plan: ParallelPlan


def resolve_run(config: RunConfig, world_size: int) -> Resolved:
    """Build the model on the meta device and fit the plan to it.

    Args:
        world_size: number of processes.

    Raises:
        UserError: with every contradiction.
    """
    # Checked before anything is prepared: what a schedule refuses, it refuses for every length.
    build_learning_rate(config.learning_rate, config.optimizer.learning_rate, config.steps or ANY_NUMBER)
    hf_config = hf_config_of(config)
    if config.data.tokenizer.vocab_size is not None:
        check_vocabulary(config.data.tokenizer.vocab_size, hf_config)
    plan = with_family(config.plan, hf_config.model_type)
    model = build_model(
        hf_config,
        dtype=DTYPES[plan.precision.parameters],
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
    )
    _check_documents(config, model)
    return Resolved(hf_config, model, resolve_plan(plan, model, batch_shape(config), world_size))


def hf_config_of(config: RunConfig, *, end_id: int | None = None) -> PretrainedConfig:
    """Return the Hugging Face configuration of a run's model.

    If the run asks for it, the vocabulary is enlarged to hold every token.

    Args:
        end_id: token that ends a document, for a new model whose configuration does not set it.

    Raises:
        UserError: if there is no such model, or no such tokenizer.
    """
    hf_config = load_hf_config(config.model, end_id=end_id)
    if config.model.enlarge_vocabulary:
        cache = Cache(Path(config.data.cache_directory), leads=rank_from_environment() == 0)
        text_config = hf_config.get_text_config()
        needed = open_tokenizer(config.data.tokenizer, cache).vocab_size
        text_config.vocab_size = max(text_config.vocab_size, needed)
    return hf_config


def _check_documents(config: RunConfig, model: PreTrainedModel) -> None:
    if config.data.documents != "separate":
        return
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{type(model).__name__} takes no position_ids, by which documents are kept apart; set data.documents = "
            '"joined", or data.form = "padded"'
        )
    constant = constant_length(model)
    if constant is not None and constant < config.data.sequence_length:
        raise ModelError(
            f'data.documents = "separate", but documents of more than {constant:,} tokens change the rotary '
            f"frequencies of this {type(model).__name__} for all others in their batch (rope_type in its "
            f'rope_parameters); set data.sequence_length = {constant:,} or less, or data.documents = "joined"'
        )


def check_vocabulary(needed: int, hf_config: PretrainedConfig) -> None:
    """Check that the model's vocabulary can hold every token.

    Raises:
        DataError: if it cannot.
    """
    room = hf_config.get_text_config().vocab_size
    if needed > room:
        raise DataError(
            f"the tokenizer has {needed:,} tokens, the model's vocabulary has room for {room:,}; set "
            f"model.config.vocab_size = {needed} or more for a new model, model.enlarge_vocabulary = true for a "
            "pretrained one, or use the tokenizer that belongs to it"
        )


def batch_shape(config: RunConfig) -> BatchShape:
    """Return the shape of a run's batches."""
    data = config.data
    return BatchShape(config.global_batch_size, config.micro_batch_size, data.sequence_length, data.pad_to_multiple_of)


def check_run(config: RunConfig, world_size: int) -> None:
    """Print what each of `world_size` processes would hold.

    Raises:
        UserError: with every contradiction.
    """
    check_directory(config)
    check_beginning(config)
    resolved = resolve_run(config, world_size)
    show_plan_table(resolved)
    show_shares(account(resolved.model, resolved.plan))
    console.line(batch_equation(resolved.plan, batch_shape(config)))
    console.line("The plan fits the model, the batches and the processes. Activations and buffers are not counted.")


def show_plan(config: RunConfig, *, world_size: int | None, as_toml: bool) -> None:
    """Print the resolved plan of a run.

    Args:
        world_size: number of processes; None: that of torchrun, or the number that the given
            degrees need.
        as_toml: print a plan file and nothing else.
    """
    resolved = resolve_run(config, world_size or natural_world_size(config.plan))
    if as_toml:
        console.line(dump_toml(resolved.plan).rstrip())
    else:
        show_plan_table(resolved)
        console.line(batch_equation(resolved.plan, batch_shape(config)))


def show_plan_table(resolved: Resolved) -> None:
    """Print a resolved plan as a table, without the rules of its family."""
    plan, model = resolved.plan, resolved.model
    rows = [
        ("model", f"{type(model).__name__}, {model.num_parameters():,} parameters"),
        ("mesh", plan.mesh.described(only_wide=False)),
    ]
    if plan.mesh.pp > 1:
        layers = plan.pipeline.layers_per_stage
        rows.append(("pipeline", f"{plan.pipeline.schedule}, layers per stage {layers}"))
    if plan.mesh.tp > 1:
        switches = [name for name in ("sequence_parallel", "loss_parallel") if getattr(plan.tensor, name)]
        rows.append(("tensor", f"{len(plan.tensor.styles)} rules, {', '.join(switches) or 'replicated stream'}"))
    if plan.mesh.is_sharded:
        rows.append(
            ("shard", f"over {plan.mesh.fsdp_degree} ranks, reshard after forward: {plan.shard.reshard_after_forward}")
        )
    if plan.shard.offload == "cpu":
        rows.append(("offload", "parameters, gradients and optimizer state in host memory"))
    precision = plan.precision
    rows.append(
        ("precision", f"parameters {precision.parameters}, compute {precision.compute}, reduce {precision.reduce}")
    )
    recompute = plan.recompute
    rows.append(
        ("recompute", recompute.mode if recompute.mode == "none" else f"{recompute.mode}, every {recompute.every}")
    )
    rows.append(("compile", f"per layer, {plan.compile.backend}" if plan.compile.enabled else "no"))
    console.table(f"Plan {plan_hash(plan)}", ["part", "resolved"], rows)


def show_shares(shares: list[StageShare]) -> None:
    """Print which ranks hold each stage, and its bytes on each process."""
    rows = [
        (
            share.stage,
            _range(share.ranks),
            _layers(share),
            f"{share.num_parameters:,}",
            f"{share.num_local_parameters:,}",
            _megabytes(share.parameter_bytes),
            _megabytes(share.gradient_bytes),
            _megabytes(share.optimizer_bytes),
        )
        for share in shares
    ]
    columns = ["stage", "ranks", "holds", "parameters", "per rank", "MB parameters", "MB gradients", "MB optimizer"]
    console.table("Stages", columns, rows)


def batch_equation(plan: ParallelPlan, batch: BatchShape) -> str:
    """Return how the global batch is made up, as text."""
    return (
        f"global batch {batch.global_batch_size} sequences = {batch.micro_batch_size} per microbatch "
        f"x {num_microbatches(plan, batch)} microbatches x {plan.mesh.data_degree} data-parallel; "
        f"x {batch.sequence_length:,} tokens = {batch.global_batch_size * batch.sequence_length:,} tokens per step"
    )


def natural_world_size(plan: ParallelPlan) -> int:
    """Return the number of processes of torchrun; without it, the number that the degrees need."""
    world_size = world_size_from_environment()
    return world_size if world_size > 1 else plan.mesh.fixed_degree


def _range(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _layers(share: StageShare) -> str:
    first, behind = share.layers
    parts = ["embedding"] if share.has_embedding else []
    if behind > first:
        parts.append(f"layer {first}" if behind == first + 1 else f"layers {first}-{behind - 1}")
    return ", ".join([*parts, "head"] if share.has_head else parts)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.{1 if num_bytes >= 1e6 else 2}f}"
