"""The command `meshtrain verify RUN`: it makes the proofs of a run."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.config.data import DataConfig
from meshtrain.config.families import with_family
from meshtrain.config.lora import NO_LORA, LoraConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import STOCK_ROUTER, RouterConfig
from meshtrain.errors import ConfigError, Problem
from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.layer_config import values_in_layers
from meshtrain.models.lora import make_adapters
from meshtrain.models.packed import BLOCK
from meshtrain.models.tiny import HEADS, SHORT, key_value_heads
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.packing import check_packing
from meshtrain.parallel.tensor.adapters import check_adapters_of
from meshtrain.parallel.tensor.head_share import uneven_heads
from meshtrain.parallel.tensor.styles import STYLES
from meshtrain.parallel.tiny_copy import copy_with_all_kinds, layer_kinds, tiny_config
from meshtrain.training.resolve import ResolvedRun
from meshtrain.verify.case import MICRO_BATCH_SIZE, SEQUENCE, ProofCase, Rows
from meshtrain.verify.prove import prove, show_proof, write_json
from meshtrain.verify.shrink import deepen, shrink_lora, shrink_mesh, shrink_plan

FEWEST_MICROBATCHES = 4
# Two processes share them unevenly, and need a part of a group of query heads.
UNEVEN_HEADS, UNEVEN_KEYS = 9, 3


def verify_run(resolved: ResolvedRun, json_file: Path | None) -> bool:
    """Prove the plan of a run on a tiny copy of its model, and print the proof.

    Args:
        resolved: the run at its real size. Contradictions at this size were found when it was
            resolved, and a tiny copy would not show them.
        json_file: where to write the proofs as well.

    Returns:
        Whether the plan computes what one device computes.

    Raises:
        UserError: if it cannot be proven, because the tiny model, or the plan for it, is refused.
    """
    proofs = []
    for case in make_cases(resolved):
        proofs.append(prove(case))
        show_proof(proofs[-1])
    if json_file is not None:
        write_json(proofs, json_file)
    return all(proof.holds for proof in proofs)


def make_cases(resolved: ResolvedRun) -> list[ProofCase]:
    """Return the cases to prove for a run: its plan on small meshes that have all its axes.

    Args:
        resolved: the run at its real size. Only a run that fits can be proven.
    """
    config = resolved.config
    return make_cases_of(
        resolved.hf_config,
        # Whether the loss is computed in chunks follows from the real size.
        config.plan.model_copy(update={"loss": resolved.plan.loss}),
        rows=rows_of(config.data),
        attention=config.model.attention,
        trust_remote_code=config.model.trust_remote_code,
        pretrained=config.model.weights == "pretrained",
        router=config.router,
        objective=config.objective,
        lora=config.lora,
    )


def make_cases_of(hf_config: PretrainedConfig, plan: ParallelPlan, **choices: Any) -> list[ProofCase]:
    """Return the cases to prove for a model under an unresolved plan; see `make_case`."""
    # Settings that the plan leaves open are resolved for the tiny model separately.
    plan = with_family(plan, hf_config.model_type)
    meshes = shrink_mesh(plan.mesh, most_tp=_most_tp(hf_config, plan.mesh.tp))
    return [make_case(hf_config, plan, mesh, **choices) for mesh in meshes]


def rows_of(data: DataConfig) -> Rows:
    """Return the kind of the rows in the batches of a run."""
    if data.form == "packed":
        return data.documents
    return "padded" if data.pad_to_multiple_of is None else "bucketed"


def _most_tp(hf_config: PretrainedConfig, tp: int) -> int:
    """Return the largest number of processes that may share a layer of the tiny model.

    They share its key-value heads only if they must.
    """
    if is_uneven(hf_config, tp):
        # The copy has an odd number of heads.
        return 2
    text = hf_config.get_text_config()
    heads, *others = values_in_layers(text, "num_attention_heads")
    between = (key_value_heads(text) or heads) not in (1, heads)
    return 2 if between or others else HEADS


def is_uneven(hf_config: PretrainedConfig, tp: int) -> bool:
    """Return whether processes share the query heads of a model unevenly."""
    heads = uneven_heads(hf_config, tp)
    return heads is not None and heads.queries % tp != 0


def _keys(hf_config: PretrainedConfig, tp: int) -> int | None:
    """Return the number of key-value heads of a tiny model with uneven heads: one, some or all."""
    heads = uneven_heads(hf_config, tp)
    if heads is None or heads.queries % tp == 0:
        return None
    return 1 if heads.keys == 1 else UNEVEN_HEADS if heads.keys == heads.queries else UNEVEN_KEYS


def _heads(hf_config: PretrainedConfig, plan: ParallelPlan, tp: int) -> int:
    """Return the number of attention heads of the tiny model.

    Every block of a projection that is made of four gets some of them.
    """
    if is_uneven(hf_config, tp):
        return UNEVEN_HEADS
    if not any(STYLES[style].four_blocks for style in plan.tensor.styles.values()):
        return HEADS
    (heads,) = values_in_layers(hf_config, "num_attention_heads")
    return 4 * plan.mesh.tp if heads % (4 * tp) == 0 else heads


def make_case(
    hf_config: PretrainedConfig,
    plan: ParallelPlan,
    mesh: MeshPlan,
    *,
    rows: Rows = "joined",
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    pretrained: bool = False,
    router: RouterConfig = STOCK_ROUTER,
    objective: ObjectiveConfig = STOCK_OBJECTIVE,
    lora: LoraConfig = NO_LORA,
) -> ProofCase:
    """Return a tiny model of the same class under the plan on a small mesh.

    Args:
        hf_config: of the model itself.
        plan: with its family already joined.
        mesh: at most a few processes.
        rows: of the batches.
        pretrained: whether the run starts from given weights.
        router: how the run trains routers.
        objective: what the run minimizes.
        lora: the adapters of the run, if it has any.

    Raises:
        UserError: if the tiny model cannot be built, lacks a kind of layer, or contradicts the
            plan.
    """
    real, plan = plan.mesh, shrink_plan(plan, mesh)
    heads = _heads(hf_config, plan, max(real.tp, mesh.tp))
    # Documents in one row share one length for the frequencies, and alone each has its own.
    short = SEQUENCE if rows == "separate" else SHORT
    keys = _keys(hf_config, max(real.tp, mesh.tp))
    # Processes of tp cut the inputs of projections between two blocks.
    block = BLOCK * mesh.tp if lora.base == "nf4" else 1
    make = partial(tiny_config, hf_config, tp=real.tp, heads=heads, keys=keys, short=short, block=block)
    build = partial(build_meta_model, dtype=DTYPES["float64"], attention=attention, trust_remote_code=trust_remote_code)
    plans = {number: deeper for deeper, number in deepen(plan)}
    number, tiny, model = copy_with_all_kinds(layer_kinds(build(hf_config)), plans, make, build)
    plan = plans[number]
    microbatches = max(FEWEST_MICROBATCHES, mesh.pp * plan.pipeline.stages_per_rank)
    global_batch_size = MICRO_BATCH_SIZE * microbatches * mesh.data_degree
    world_size = mesh.world_size
    batch = BatchShape(global_batch_size, MICRO_BATCH_SIZE, SEQUENCE, separates=rows == "separate")
    plan = resolve_plan(plan, model, batch, world_size, router=router)
    lora = shrink_lora(lora)
    if lora.rank is not None:
        check_adapters_of(model, make_adapters(model, lora), plan)
        _check_packing(model, lora, plan)
    return ProofCase(
        architecture=type(model).__name__,
        hf_config=tiny,
        plan=plan,
        global_batch_size=global_batch_size,
        rows=rows,
        attention=attention,
        trust_remote_code=trust_remote_code,
        pretrained=pretrained,
        router=router,
        objective=objective,
        lora=lora,
    )


def _check_packing(model: PreTrainedModel, lora: LoraConfig, plan: ParallelPlan) -> None:
    """Check that the tiny model can be kept in the format that the run asks for.

    Raises:
        ConfigError: if it cannot, although the model itself can.
    """
    try:
        check_packing(model, lora, plan)
    except ConfigError as error:
        advice = "prove it with lora.base = 'parameters'"
        raise ConfigError(Problem(f"a tiny copy: {it.found}", advice) for it in error.problems) from error
