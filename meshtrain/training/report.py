"""The tables that `check`, `plan` and the head of every run print."""

from collections import Counter
from typing import get_args

from transformers import PreTrainedModel

from meshtrain import console
from meshtrain.config.batch_ramp import BatchRampConfig
from meshtrain.config.mesh import EXPERT_FSDP_AXES
from meshtrain.config.plan import ContextMethod, ParallelPlan
from meshtrain.config.toml import plan_hash
from meshtrain.console import BYTES_PER_MB
from meshtrain.errors import name_some
from meshtrain.models.adapters import adapter_parameters
from meshtrain.models.patterns import as_pattern
from meshtrain.models.whole.half import LanguageHalf
from meshtrain.parallel.account import StageShare, account, messages
from meshtrain.parallel.check.batch import num_microbatches
from meshtrain.parallel.check.context import context_bytes
from meshtrain.parallel.check.documents import why_mask
from meshtrain.parallel.context.mixing import mixing_blocks
from meshtrain.parallel.experts.stacks import expert_stacks, num_experts
from meshtrain.parallel.float8.layers import SKIPPED, float8_layers_of
from meshtrain.parallel.tensor.head_share import uneven_heads
from meshtrain.pictures.tables import Table
from meshtrain.training.distillation.teacher import Teacher
from meshtrain.training.resolve import ResolvedRun


def show_run(resolved: ResolvedRun) -> None:
    """Print a resolved plan, what each process holds, and how a global batch is made up."""
    _show_half(resolved)
    shares = shares_table(resolved.shares())
    for table in (plan_table(resolved), shares, *border_tables(resolved)):
        console.table(table.title, table.columns, table.rows)
    console.line(batch_equation(resolved))


def show_plan(resolved: ResolvedRun) -> None:
    """Print a resolved plan, and how a global batch is made up."""
    _show_half(resolved)
    for table in (plan_table(resolved), *border_tables(resolved)):
        console.table(table.title, table.columns, table.rows)
    console.line(batch_equation(resolved))


def _show_half(resolved: ResolvedRun) -> None:
    if resolved.half is not None:
        console.line(_half_line(resolved.half, resolved.model.num_parameters()))


def _half_line(half: LanguageHalf, num_parameters: int) -> str:
    """Return which half of a multimodal model is trained, and what stays."""
    kept = [f"{name} ({number:,})" for name, number in half.count_rest().items()]
    return (
        f"Only the language half of {type(half.whole).__name__} is trained, on text: {half.where} "
        f"({num_parameters:,} parameters). Left as they are: {name_some(kept) or 'no other parameters'}"
    )


def plan_table(resolved: ResolvedRun) -> Table:
    """Return a resolved plan, without the rules of its family."""
    plan, model = resolved.plan, resolved.model
    rows = [
        ("model", f"{type(model).__name__}, {model.num_parameters():,} parameters{_frozen(model)}"),
        ("mesh", plan.mesh.described(only_wide=False)),
    ]
    if resolved.teacher is not None:
        rows.insert(1, ("teacher", _teacher(resolved.teacher)))
    if resolved.adapters:
        rows.insert(1, ("adapters", _adapters(resolved)))
    if plan.mesh.pp > 1:
        layers = plan.pipeline.layers_per_stage
        rows.append(("pipeline", f"{plan.pipeline.schedule}, layers per stage {layers}"))
    if plan.mesh.tp > 1:
        switches = [name for name in ("sequence_parallel", "loss_parallel") if getattr(plan.tensor, name)]
        rows.append(("tensor", f"{len(plan.tensor.styles)} rules, {', '.join(switches) or 'replicated stream'}"))
        rows += _heads(resolved)
    if plan.mesh.cp > 1:
        rows.append(("context", _context(resolved)))
    if plan.attention.documents != "auto":
        rows.append(("attention", _attention(resolved)))
    if plan.mesh.ep > 1:
        rows.append(("experts", _experts(plan, model)))
    if plan.mesh.is_sharded:
        rows.append(("shard", _shard(plan)))
    if plan.shard.offload == "cpu":
        rows.append(("offload", "parameters, gradients and optimizer state in host memory"))
    precision = plan.precision
    rows.append(
        ("precision", f"parameters {precision.parameters}, compute {precision.compute}, reduce {precision.reduce}")
    )
    if precision.compute == "float8":
        rows.append(("float8", _float8(resolved)))
    recompute = plan.recompute
    rows.append(
        ("recompute", recompute.mode if recompute.mode == "none" else f"{recompute.mode}, every {recompute.every}")
    )
    rows.append(("compile", f"per layer, {plan.compile.backend}" if plan.compile.enabled else "no"))
    chunk = plan.loss.size
    rows.append(("loss", f"logits in chunks of {chunk:,} tokens" if chunk else "all logits at once"))
    return Table(f"Plan {plan_hash(plan)}", ("part", "resolved"), tuple(rows))


def _adapters(resolved: ResolvedRun) -> str:
    """Return what trains beside a frozen model."""
    lora, added = resolved.config.lora, sum(it.numel() for it in adapter_parameters(resolved.adapters).values())
    number = added + resolved.model.num_parameters(only_trainable=True)
    share = number / (added + resolved.model.num_parameters())
    modules = name_some(sorted({name.rpartition(".")[2] for name in resolved.adapters}), limit=8)
    whole = f", {name_some(lora.modules_to_save)} in full" if lora.modules_to_save else ""
    kind = "DoRA" if lora.dora else "LoRA"
    rest = "frozen" if lora.base == "parameters" else f"frozen, its projections in {lora.base}"
    trains = f"{kind} of rank {lora.rank} on {modules}{whole}: {number:,} parameters train ({share:.2%})"
    return f"{trains}, the rest is {rest}"


def _teacher(teacher: Teacher) -> str:
    """Return what a teacher is, and how much of it each process holds."""
    model = teacher.build_model()
    per_rank = Counter[int]()
    for share in account(model, teacher.plan):
        per_rank[share.pp_rank] += share.parameter_bytes
    size = f"{max(per_rank.values()) / BYTES_PER_MB:,.2f} MB on a process at most, beside those of the model"
    held = f"frozen in {teacher.plan.precision.parameters}, {size}"
    counts = teacher.plan.pipeline.layer_counts
    if len(counts) > 1:
        kept = "logits" if teacher.base is None else "last hidden states"
        held = f"{held}, layers per stage {counts}; the {kept} of a batch are kept for the loss"
    return f"{type(model).__name__}, {model.num_parameters():,} parameters, {held}"


def _frozen(model: PreTrainedModel) -> str:
    """Return how many of the parameters train, if some are frozen."""
    trained = model.num_parameters(only_trainable=True)
    return "" if trained == model.num_parameters() else f", of which {trained:,} train"


def _shard(plan: ParallelPlan) -> str:
    """Return what is sharded, when parameters are freed, and when gradients are reduced."""
    shard = plan.shard
    parts = [
        f"level {shard.level} over {plan.mesh.fsdp_degree} ranks",
        f"reshard after forward: {shard.reshard_after_forward}",
        f"gradients reduced {shard.reduce_gradients.replace('_', ' ')}",
    ]
    return ", ".join(parts if shard.prefetch == "implicit" else [*parts, f"{shard.prefetch} layers gathered ahead"])


def _context(resolved: ResolvedRun) -> str:
    """Return how attention sees full sequences, what it gets, and which blocks compute on them."""
    plan, model = resolved.plan, resolved.model
    described = f"{plan.context.method}, {plan.context.order} parts"
    methods: tuple[ContextMethod, ...] = get_args(ContextMethod)
    sent = {method: context_bytes(plan, model, resolved.batch, method) for method in methods}
    if all(sent.values()):
        numbers = " or ".join(f"{_megabytes(number or 0)} MB by {method}" for method, number in sent.items())
        described += f"; attention of a layer gets {numbers}"
    blocks = sorted({as_pattern(name) for name in mixing_blocks(model)})
    return described + (f"; on full sequences: {', '.join(blocks)}" if blocks else "")


def _experts(plan: ParallelPlan, model: PreTrainedModel) -> str:
    """Return how many experts a process has, and which processes share them."""
    numbers = {num_experts(stack) for stack in expert_stacks(model).values()}
    mine = " or ".join(f"{number // plan.mesh.ep} of {number}" for number in sorted(numbers))
    shared = plan.mesh.degree(*EXPERT_FSDP_AXES)
    return f"{mine} in a layer on each process, " + (f"sharded over {shared} ranks" if shared > 1 else "not sharded")


def _float8(resolved: ResolvedRun) -> str:
    """Return how many linear layers compute in float8, and which ones do not, and why."""
    plan = resolved.plan
    layers = float8_layers_of(resolved.model, plan)
    number = len(layers.chosen) + len(layers.others)
    described = f"{plan.precision.float8.recipe}, {len(layers.chosen)} of {number} linear layers of the decoder layers"
    for reason, names in layers.reasons().items():
        shown = plan.precision.float8.skip or () if reason == SKIPPED else names
        described += f"; in bfloat16, {reason}: {name_some(shown, limit=8)}"
    return described


def _attention(resolved: ResolvedRun) -> str:
    """Return how attention keeps documents apart."""
    if resolved.plan.attention.documents == "segments":
        return "per document"
    # The plan may ask for a mask.
    reason = why_mask(resolved.plan, resolved.model) or "attention.documents = 'mask'"
    return f"dense mask of documents ({reason})"


def _heads(resolved: ResolvedRun) -> list[tuple[str, str]]:
    """Return what it costs if tp does not divide the attention heads, as a row, or nothing."""
    tp = resolved.plan.mesh.tp
    heads = uneven_heads(resolved.model.config, tp)
    if heads is None or heads.queries % tp == 0:
        return []
    few = heads.queries // tp
    cost = f"{few} or {few + 1} of {heads.queries} for each process, which all wait for those with {few + 1}"
    return [("heads", f"{cost}; the projections of attention are whole on each")]


def shares_table(shares: list[StageShare]) -> Table:
    """Return which ranks hold each stage, and its bytes on each process."""
    rows = tuple(
        (
            str(share.stage),
            _range(share.ranks),
            held_layers(share),
            f"{share.num_parameters:,}",
            f"{share.num_local_parameters:,}",
            _megabytes(share.parameter_bytes),
            _megabytes(share.gradient_bytes),
            _megabytes(share.optimizer_bytes),
        )
        for share in shares
    )
    columns = ("stage", "ranks", "holds", "parameters", "per rank", "MB parameters", "MB gradients", "MB optimizer")
    return Table("Stages", columns, rows)


def border_tables(resolved: ResolvedRun) -> list[Table]:
    """Return what each stage sends to the next, as a table; nothing without a pipeline."""
    if resolved.plan.mesh.pp == 1:
        return []
    batch = resolved.batch
    rows = tuple(
        (
            f"{message.stage - 1} to {message.stage}",
            message.origin,
            " x ".join(map(str, message.shape)),
            _megabytes(message.num_bytes),
            "yes" if message.has_gradient else "no",
        )
        for message in messages(resolved.model, resolved.plan, batch.micro_batch_size, batch.sequence_length)
    )
    return [Table("Messages per microbatch", ("stages", "tensor", "shape", "MB", "gradient back"), rows)]


def batch_equation(resolved: ResolvedRun) -> str:
    """Return how a global batch is made up, in a line."""
    plan, batch = resolved.plan, resolved.batch
    kind = batch.counted_in if batch.rows == 1 else f"{batch.counted_in} of {batch.rows} rows"
    return (
        f"global batch {batch.global_batch_size // batch.rows} {kind} = {batch.micro_batch_size // batch.rows} per "
        f"microbatch "
        f"x {num_microbatches(plan, batch)} microbatches x {plan.mesh.data_degree} data-parallel; "
        f"x {batch.sequence_length:,} tokens = {batch.global_batch_size * batch.sequence_length:,} tokens per step"
        f"{_of_ramp(resolved.config.batch_ramp, batch.counted_in)}"
    )


def _of_ramp(ramp: BatchRampConfig, counted_in: str) -> str:
    return "" if ramp.first is None else f", after {ramp.steps:,} steps with fewer, from {ramp.first:,} {counted_in}"


def _range(ranks: tuple[int, ...]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def held_layers(share: StageShare) -> str:
    """Return what a stage holds, as "embedding, layers 0-3"."""
    first, behind = share.layers
    parts = ["embedding"] if share.has_embedding else []
    if behind > first:
        parts.append(f"layer {first}" if behind == first + 1 else f"layers {first}-{behind - 1}")
    return ", ".join([*parts, "head"] if share.has_head else parts)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / BYTES_PER_MB:,.{1 if num_bytes >= BYTES_PER_MB else 2}f}"
