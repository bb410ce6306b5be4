"""Tensor parallelism: the rules of a plan, and what shards the modules of a stage by them.

Modules:
    adapter_dropout: dropout on the inputs of adapters.
    adapters: shards LoRA adapters in the same way as the projections that they belong to.
    behavior: finds out how a module with full parameters computes on a part of the heads.
    collectives: the collectives of tensor parallelism, with their gradients.
    context: where a module lies in the model, and what the classes that apply a style share.
    dataflow: derives rules from what a tiny copy of a model computes.
    derive: chooses where the rules of a model come from, and completes them.
    dora: computes and shards the magnitudes of adapters.
    draws: selects the random stream for each part of a decoder layer.
    experts: applies the styles of stacked experts.
    flow: follows the parts of the heads through one forward pass on the meta device.
    head_share: counts the heads of one process, also where tp does not divide their number.
    heads: makes attention modules count and read only the heads of one process.
    input_blocks: chooses the blocks that share an input, or get the full sequence.
    late_gradients: computes gradients of weights while those of their inputs are summed.
    local_shapes: gives the traces of a cut model the shapes of one process.
    memory: remembers what was found out about classes.
    modules: module classes that hold a shard of their weights.
    origins: tracks which tensors are parts, and which parameters the full ones come from.
    own_heads: applies the styles of projections and parameters of heads that stay full.
    probes: finds out by a cheap run what a module of an unknown class does.
    region: how hidden states are distributed over tp, and the collectives around sharded weights.
    requirements: what a module must be for a style.
    rules: resolves the rules of a plan for one model, and checks them.
    sequence: splits the hidden states along the sequence, and joins them.
    shared_heads: chooses the styles of attention where tp does not divide the heads.
    shared_keys: applies the styles of keys and values that all heads share.
    sources: finds rules that are known, and those that are derived from values.
    split_flow: runs a model on the meta device with hidden states that are split.
    style_row: the facts of one style.
    styles: the table of styles, and the classes that apply them.

The package itself has `apply_tensor_parallel`, which applies the styles to a stage. Weights become
DTensors, so that sharding over dp, checkpoints and initialization know the global tensor. The
computation uses plain local tensors and the four collectives per layer of Megatron. DTensor
dispatch in every projection would cost a tenth of a step and seven collectives.

Between attention and MLP the hidden states are replicated over tp. With `sequence_parallel` each
process keeps its part of the sequence instead. The sequence is split before the first decoder layer
and joined after the last, so embedding, final norm and head are the same in both cases. A parameter
gets a partial gradient if it only sees a part of the sequence (norms, biases of row-wise
projections) or a part of the heads (q_norm, k_norm, a temperature of queries), or if results that
it is in are summed (biases and norms of experts). Its name goes into `summed_over_tp`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from meshtrain.config.plan import ParallelPlan
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.randomness import Streams
from meshtrain.parallel.tensor.adapters import shard_adapters
from meshtrain.parallel.tensor.context import ModuleContext
from meshtrain.parallel.tensor.draws import separate_streams
from meshtrain.parallel.tensor.heads import apply_local_heads
from meshtrain.parallel.tensor.region import Region
from meshtrain.parallel.tensor.rules import TensorRules, blocks_of, name_of
from meshtrain.parallel.tensor.sequence import shard_hidden_states
from meshtrain.parallel.tensor.styles import STYLES
from meshtrain.parallel.transposable import prepare_sums


def apply_tensor_parallel(
    stage: Stage,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    rules: TensorRules,
    adapters: Mapping[str, nn.Module],
    streams: Streams | None,
    *,
    posts_sums: bool,
) -> set[str]:
    """Shard the modules of a stage over the tp axis, in place.

    Args:
        stage: on the meta device, unfused and cut.
        mesh: the 1-D tp mesh.
        plan: resolved.
        rules: of the complete model.
        adapters: LoRA layers of the stage, by the FQN of their base. The stage holds the base in
            their position; they are sharded in the same way as the base.
        streams: random streams of this process; None if nothing is random in training.
        posts_sums: whether gradients of weights may be computed while others travel. In compiled
            layers they are not.

    Returns:
        The names of the parameters whose gradients are partial over tp.
    """
    prepare_sums()
    group, is_split = mesh.get_group(), plan.tensor.sequence_parallel
    outside = Region(group, sequence_parallel=False, streams=streams, posts_sums=posts_sums)
    inside = replace(outside, sequence_parallel=is_split, posts_sums=posts_sums and not plan.compile.enabled)
    context_of = _contexts(stage, inside, outside, rules)
    summed_over_tp: set[str] = set()
    for name, module in list(stage.model.named_modules()):
        style = rules.styles.get(name)
        if style is None or not any(True for _ in module.parameters()):
            continue
        context, row = context_of(name, module), STYLES[style]
        parallelize_module(module, mesh, row.apply(context))
        partial = row.partial_parameters(module, context)
        summed_over_tp |= {f"{name}.{kind}" for kind in partial}
    summed_over_tp |= shard_adapters(stage.model, adapters, mesh, context_of)
    apply_local_heads(stage.model, rules, rank=group.rank(), tp=group.size())
    if is_split:
        shard_hidden_states(stage, group)
    if streams is not None:
        separate_streams(stage, rules.styles, streams, sequence_parallel=is_split)
    _tie_again(stage)
    return summed_over_tp


def _contexts(
    stage: Stage, inside: Region, outside: Region, rules: TensorRules
) -> Callable[[str, nn.Module], ModuleContext]:
    layers_prefix = name_of(stage.model, stage.layers) + "."
    whole = replace(inside, sequence_parallel=False)
    head, config = stage.model.get_output_embeddings(), stage.model.config.get_text_config()

    def context_of(name: str, module: nn.Module) -> ModuleContext:
        sees_all = any(blocks_of(name, rules.styles, "full sequence"))
        return ModuleContext(
            name=name,
            region=outside if not name.startswith(layers_prefix) else whole if sees_all else inside,
            entered=any(blocks_of(name, rules.styles, "shared input")),
            gathers_logits=not (rules.logits_are_sharded and module is head),
            styles=rules.styles,
            sharded_dims=rules.sharded_dims,
            summed=rules.summed,
            config=config,
        )

    return context_of


def _tie_again(stage: Stage) -> None:
    # Sharding replaced all names of a parameter by new parameters, so they are tied again.
    for name, first in stage.names_of_one_parameter().items():
        owner = stage.model.get_submodule(name.rpartition(".")[0])
        owner.register_parameter(name.rpartition(".")[2], stage.model.get_parameter(first))
