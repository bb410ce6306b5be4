"""LoRA adapters of sharded projections: base(x) + B(A(dropout(x))) * scaling.

A and B are cut to match the base. For a column-wise projection, A is full and B is cut by rows like
the base. For a row-wise projection, A is cut by columns, its few outputs are summed over tp, and B
is full. For an embedding, A is cut by rows of the vocabulary. So an adapter costs at most one
collective on a few numbers per token (its rank), and its output is distributed over tp like the
output of the base.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from meshtrain.compat.nn import mix_in
from meshtrain.compat.peft import replace_methods
from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.errors import PlanError, Problem
from meshtrain.models.adapters import adapters_of, embedding_adapters_of
from meshtrain.models.copying import copy_module
from meshtrain.models.dora import KIND, magnitudes_of
from meshtrain.models.fused import UnfusedProjection, unfuse
from meshtrain.models.layout import local_tensor
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.tensor.adapter_dropout import AdapterDropout
from meshtrain.parallel.tensor.context import ModuleContext
from meshtrain.parallel.tensor.dora import shard_magnitudes
from meshtrain.parallel.tensor.modules import OwnOutputs, ShardedEmbedding, ShardedLinear, become_sharded
from meshtrain.parallel.tensor.region import Edge, identity
from meshtrain.parallel.tensor.rules import TensorRules, resolve_rules
from meshtrain.parallel.tensor.shared_keys import share_rotary_key
from meshtrain.parallel.tensor.style_row import StyleRow
from meshtrain.parallel.tensor.styles import STYLES

Cut = Literal["columns", "rows", "vocabulary", "full"]


def check_adapters(model: nn.Module, layers: Mapping[str, nn.Module], rules: TensorRules, *, is_split: bool) -> None:
    """Check that each adapter can be cut to match its base.

    Args:
        model: unfused, with the adapters taken off.
        layers: the LoRA layers, by the FQN of their base.
        rules: of the model.
        is_split: whether hidden states between the blocks of a layer are split along the sequence
            (sequence parallelism).

    Raises:
        PlanError: with one line for each pattern of modules that cannot be cut.
    """
    problems: dict[Problem, None] = {}
    for name, layer in layers.items():
        styles = [rules.styles[part] for part, _ in _parts(name, model.get_submodule(name))]
        words = " and ".join(map(repr, sorted({*styles})))
        what, cut = f"{as_pattern(name)} has a LoRA adapter and the tensor style {words}", _cut_of(styles)
        if cut is None:
            uneven = any(STYLES[style].takes == "own heads" for style in styles)
            remedy = "use a tp that divides the attention heads" if uneven else "set tp = 1"
            advice = f"leave it out of target_modules, or {remedy}"
            problems[Problem(f"{what}, which no adapter can follow", advice)] = None
        elif magnitudes_of(layer) and any(STYLES[style].adapter == "rotary key" for style in styles):
            found = f"{what}, part of whose outputs is summed, which lora.dora cannot follow"
            problems[Problem(found, "leave it out of target_modules, or set dora = false")] = None
        elif (
            is_split
            and adapters_of(layer)
            and drops_out(layer)
            and cut != "columns"
            and not _draws_apart(STYLES[styles[0]])
        ):
            found = f"{what}: its dropout cannot be the same on all processes with tensor.sequence_parallel"
            problems[Problem(found, "set lora_dropout = 0, or tensor.sequence_parallel = false")] = None
    if problems:
        raise PlanError(problems)


def check_adapters_of(model: PreTrainedModel, layers: Mapping[str, nn.Module], plan: ParallelPlan) -> None:
    """Check as `check_adapters` does, before the model is changed.

    Args:
        model: stock, with the adapters taken off. It is not changed.
        layers: the LoRA layers, by the FQN of their base.
        plan: resolved.

    Raises:
        PlanError: with one line for each pattern of modules that cannot be cut.
    """
    if layers and plan.mesh.tp > 1:
        unfused = _unfused(model, plan)
        check_adapters(unfused, layers, resolve_rules(unfused, plan.tensor), is_split=plan.tensor.sequence_parallel)


def dims_of_adapters(model: nn.Module, layers: Mapping[str, nn.Module], rules: TensorRules) -> dict[str, int]:
    """Return FQN of a weight of A or B -> the dimension that tensor parallelism divides.

    Args:
        model: unfused, with the adapters taken off.
        layers: the LoRA layers, by the FQN of their base.
        rules: of the model.
    """
    dims = {}
    for name, layer in layers.items():
        styles = [rules.styles[part] for part, _ in _parts(name, model.get_submodule(name))]
        cut = _cut_of(styles)
        for adapter, _, _ in adapters_of(layer):
            # Next to the weights of uneven heads, which stay full, B stays full too.
            if cut == "columns" and any(STYLES[style].shards is not None for style in styles):
                dims[f"{name}.lora_B.{adapter}.weight"] = 0
                dims[f"{name}.{KIND}.{adapter}.weight"] = 0
            elif cut == "rows":
                dims[f"{name}.lora_A.{adapter}.weight"] = 1
        if cut == "vocabulary":
            dims |= {f"{name}.lora_embedding_A.{adapter}": 1 for adapter, _, _ in embedding_adapters_of(layer)}
    return dims


def _unfused(model: PreTrainedModel, plan: ParallelPlan) -> PreTrainedModel:
    copied: PreTrainedModel = copy_module(model, {})
    unfuse(copied, plan.tensor.fused)
    return copied


def _draws_apart(row: StyleRow) -> bool:
    """Return whether each process drops other elements: it has other features or tokens."""
    return row.takes_cut or row.gradients == "partial if split"


def drops_out(layer: nn.Module) -> bool:
    """Return whether an adapter of a layer has dropout."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules())


def shard_adapters(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    context_of: Callable[[str, nn.Module], ModuleContext],
) -> set[str]:
    """Shard the adapters of the modules that a stage holds, in place.

    Args:
        model: of the stage, with its own modules sharded.
        layers: LoRA layers of these modules, taken off and unfused like them, by the FQN of their
            base.
        mesh: the 1-D tp mesh.
        context_of: returns the context of a module of the stage.

    Returns:
        The names of the parameters whose gradients are partial over tp.
    """
    partial_parameters: set[str] = set()
    for name, layer in layers.items():
        base = model.get_submodule(name)
        context = context_of(name, base)
        styles = [context.styles[part] for part, _ in _parts(name, base)]
        cut = _cut_of(styles)
        if cut == "vocabulary":
            _beside_vocabulary(layer, base, mesh)
        for adapter, down, up in adapters_of(layer):
            assert isinstance(down, nn.Linear)
            if drops_out(layer):
                _separate_streams(layer, adapter, styles, context)
            if cut == "columns":
                names = _beside_columns(layer, adapter, down, base, context, mesh)
            elif cut == "rows":
                names = _beside_rows(layer, adapter, down, up, base, context, mesh)
            else:
                names = _beside_full(adapter, up, styles[0], context)
            partial_parameters |= {f"{name}.{kind}" for kind in names}
        partial_parameters |= {f"{name}.{kind}" for kind in _shard_magnitudes(layer, cut, styles, context, mesh)}
    return partial_parameters


def _shard_magnitudes(
    layer: nn.Module, cut: Cut | None, styles: Sequence[Style], context: ModuleContext, mesh: DeviceMesh
) -> list[str]:
    is_split = context.region.sequence_parallel
    if cut == "columns":
        is_sharded = [STYLES[style].shards is not None for style in styles]
        return shard_magnitudes(layer, is_sharded, mesh, is_partial=True)
    is_partial = is_split if cut == "rows" else _is_partial(STYLES[styles[0]], is_split=is_split)
    return shard_magnitudes(layer, [False] * len(styles), mesh, is_partial=is_partial)


def _is_partial(row: StyleRow, *, is_split: bool) -> bool:
    """Return whether the gradients of full parameters of an adapter are partial over tp."""
    return row.gradients == "partial" or (row.gradients == "partial if split" and is_split)


def _cut_of(styles: Sequence[Style]) -> Cut | None:
    """Return how an adapter of a projection is cut, from the styles of the projection's parts.

    Returns:
        None if no adapter can match these styles.
    """
    cuts = {STYLES[style].adapter for style in styles}
    if "columns" in cuts and cuts <= {"columns", "shared"}:
        return "columns"
    if len(styles) == 1 and cuts == {"rows"}:
        return "rows"
    if cuts == {"vocabulary"}:
        return "vocabulary"
    return "full" if len({*styles}) == 1 and cuts <= {"full", "shared", "rotary key"} else None


def _parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(module, UnfusedProjection):
        return [(f"{name}.{part}", child) for part, child in module.named_children()]
    return [(name, module)]


def _separate_streams(layer: Any, adapter: str, styles: Sequence[Style], context: ModuleContext) -> None:
    is_cut = len(styles) == 1 and STYLES[styles[0]].takes_cut
    takes_part = _cut_of(styles) == "columns" and context.entered
    layer.lora_dropout[adapter] = AdapterDropout(
        layer.lora_dropout[adapter], context.region, is_cut=is_cut, takes_part=takes_part
    )


def _beside_columns(
    layer: Any, adapter: str, down: nn.Linear, base: nn.Module, context: ModuleContext, mesh: DeviceMesh
) -> list[str]:
    """Cut B by rows, and return the names of the parameters with partial gradients.

    The gradient of the output of A is a sum over tp.
    """
    up, is_split = layer.lora_B[adapter], context.region.sequence_parallel
    names = [f"lora_B.{adapter}.{kind}" for kind in _shard_up(up, base, context, mesh)]
    # With dropout the input of A is a part of the sequence, even where the block has a full input.
    if (is_split and drops_out(layer)) or not context.entered:
        # The outputs of A are fewer than its inputs, so the collective is applied to the outputs.
        _give_edges(down, identity, context.region.enter)
    if context.entered or is_split:
        names.append(f"lora_A.{adapter}.weight")
    return names


def _shard_up(up: nn.Module, base: nn.Module, context: ModuleContext, mesh: DeviceMesh) -> list[str]:
    """Shard B, or each of its parts, like the base.

    Returns:
        The names of its parameters whose gradients stay partial.
    """
    names: list[str] = []
    for (kind, mine), (part, theirs) in zip(_parts("", up), _parts(context.name, base), strict=True):
        assert isinstance(mine, nn.Linear)
        is_full = STYLES[context.styles[part]].shards is None
        if is_full:
            names += [f"{kind}.{name}".lstrip(".") for name, _ in mine.named_parameters()]
        if isinstance(theirs, OwnOutputs):
            mix_in(mine, OwnOutputs)
            mine.enter, mine.outputs = identity, theirs.outputs  # type: ignore[assignment]
        elif not is_full:
            _shard(mine, 0, mesh)
            _give_edges(mine, identity, theirs.leave)  # type: ignore[arg-type]
    return names


def _beside_rows(
    layer: Any, adapter: str, down: nn.Linear, up: nn.Module, base: Any, context: ModuleContext, mesh: DeviceMesh
) -> list[str]:
    """Cut A by columns, sum its outputs over tp, and return the names with partial gradients."""
    _shard(down, 1, mesh)
    _give_edges(down, base.enter, context.region.leave)
    return _names_up(adapter, up) if context.region.sequence_parallel else []


def _beside_full(adapter: str, up: nn.Module, style: Style, context: ModuleContext) -> list[str]:
    row = STYLES[style]
    if row.adapter == "rotary key":
        share_rotary_key(up, context)
    if _is_partial(row, is_split=context.region.sequence_parallel):
        return [f"lora_A.{adapter}.weight", *_names_up(adapter, up)]
    return []


def _beside_vocabulary(layer: Any, base: nn.Module, mesh: DeviceMesh) -> None:
    """Cut A by the rows of the vocabulary that this process holds, and sum what it looks up."""
    assert isinstance(base, ShardedEmbedding)
    for adapter, rows, _ in embedding_adapters_of(layer):
        layer.lora_embedding_A[adapter] = _shards(rows, 1, mesh)
    replace_methods(layer, _embed=partial(_look_up, base))


def _look_up(base: ShardedEmbedding, input_ids: Tensor, table: Tensor, **_: object) -> Tensor:
    """Return (batch, seq, rank), the rows of ids (batch, seq) in a sharded table (vocab, rank)."""
    return base.leave(base.own_rows(input_ids, local_tensor(table)))


def _names_up(adapter: str, up: nn.Module) -> list[str]:
    return [f"lora_B.{adapter}.{kind}" for kind, _ in up.named_parameters()]


def _shard(module: nn.Linear, dim: int, mesh: DeviceMesh) -> None:
    for kind, parameter in list(module.named_parameters()):
        module.register_parameter(kind, _shards(parameter, dim, mesh))


def _shards(parameter: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    shards = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(shards, requires_grad=parameter.requires_grad)


def _give_edges(module: nn.Linear, enter: Edge, leave: Edge) -> None:
    become_sharded(module)
    assert isinstance(module, ShardedLinear)
    module.enter, module.leave, module.bias_is_full = enter, leave, False
