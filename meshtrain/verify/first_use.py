"""Proof of an unknown class, or of unproven flags, before the first run. Proofs are cached."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from meshtrain import console
from meshtrain.compat.transformers import attention_implementation
from meshtrain.config.data import DataConfig
from meshtrain.config.families import find_family
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.toml import plan_hash
from meshtrain.data.cache import Cache, compute_identity
from meshtrain.errors import ModelError, UserError
from meshtrain.models.own_code import is_stock, own_code
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.runtime.ranks import program_hidden
from meshtrain.training.resolve import ResolvedRun
from meshtrain.verify.case import ProofCase
from meshtrain.verify.prove import prove, write_json
from meshtrain.verify.record import uncovered_flags
from meshtrain.verify.verify_run import make_cases, make_cases_of

PROOF_NAME = "proof.json"
SWITCH = "set model.prove_unknown_class = false to train without a proof"
SWITCH_OF_PROGRAMS = "pass prove_unknown_class=False to meshtrain.parallelize to train without a proof"


def ensure_proven(resolved: ResolvedRun) -> None:
    """Prove the plan of a run once, if no shipped family is written for the class of its model.

    A class that comes with the model never belongs to a family, whatever its model type. Under
    tensor parallelism the model of a family is proven too if its configuration has flags with which
    the family is not proven.

    All processes of a run call this at once: one of them works and the others wait for it.

    Raises:
        ModelError: if the plan does not compute what one device computes.
    """
    config, hf_config, model_class = resolved.config, resolved.hf_config, type(resolved.model)
    flags = _uncovered(hf_config, config.plan)
    has_stock_class = not config.model.trust_remote_code or is_stock(model_class)
    is_known = has_stock_class and find_family(hf_config.model_type) is not None and not flags
    # Only a proof shows whether a class keeps documents apart: it may accept positions and make no
    # mask of them.
    separates = config.data.documents == "separate"
    if not config.model.prove_unknown_class or (is_known and not separates):
        return
    cases = _with_switch(partial(make_cases, resolved), SWITCH)
    _ensure(cases, model_class, config.data.cache_directory, SWITCH, flags)


def ensure_model_proven(model: PreTrainedModel, plan: ParallelPlan) -> None:
    """Do `ensure_proven` for a program's model, before it is cut. All processes call it at once.

    Args:
        model: on meta or with values; not changed. The language model of its type is proven.
        plan: not resolved, except for its mesh.

    Raises:
        ModelError: if the plan does not compute what one device computes, or the class cannot be
            built again.
    """
    model_class, config = type(model), model.config
    flags = _uncovered(config, plan)
    if is_stock(model_class) and find_family(config.model_type) is not None and not flags:
        return
    if not is_stock(model_class) and not hasattr(config, "auto_map"):
        raise ModelError(
            f"{model_class.__name__} is not a class of transformers, and no tiny copy of it can be built for a proof",
            SWITCH_OF_PROGRAMS,
        )
    choices = {
        "attention": attention_implementation(config) or "eager",
        "trust_remote_code": not is_stock(model_class),
        "pretrained": True,
    }
    cases = _with_switch(partial(make_cases_of, config, plan, **choices), SWITCH_OF_PROGRAMS)
    _ensure(cases, model_class, DataConfig().cache_directory, SWITCH_OF_PROGRAMS, flags)


def _uncovered(config: PretrainedConfig, plan: ParallelPlan) -> list[str]:
    """Return the flags with which the tp rules of the model's shipped family are not proven."""
    has_family = find_family(config.model_type) is not None
    return uncovered_flags(config) if has_family and plan.mesh.tp > 1 else []


def _ensure(
    cases: Iterable[ProofCase], model_class: type[PreTrainedModel], directory: str, switch: str, flags: Sequence[str]
) -> None:
    cache = Cache(Path(directory), leads=rank_from_environment() == 0)
    with program_hidden():
        for case in cases:
            cache.build(f"proofs/{_key(case, model_class)}", partial(_prove, case, switch=switch, flags=flags))


def _with_switch(make: Callable[[], list[ProofCase]], switch: str) -> list[ProofCase]:
    try:
        return make()
    except UserError as error:
        raise ModelError([*error.problems, f"so it cannot be proven on a tiny copy; {switch}"]) from error


def _key(case: ProofCase, model_class: type[PreTrainedModel]) -> str:
    versions = [version(library) for library in ("torch", "transformers", "meshtrain")]
    adapters = () if case.lora.rank is None else (case.lora.model_dump_json(),)
    choices = (case.rows, case.attention, case.pretrained, *adapters)
    code = own_code(model_class)
    return compute_identity(versions, case.hf_config.to_json_string(), plan_hash(case.plan), choices, code)


def _prove(case: ProofCase, directory: Path, *, switch: str, flags: Sequence[str]) -> None:
    name = case.architecture + (f" with {', '.join(flags)}" if flags else "")
    if multiprocessing.current_process().daemon:
        raise ModelError(
            f"{name} is new here, and a daemonic process may not start the processes that a proof needs", switch
        )
    what = "its documents apart" if case.rows == "separate" else "the plan"
    console.line(f"{name} is new here: proving {what} on a tiny copy of it")
    try:
        proof = prove(case)
    except UserError as error:
        raise ModelError([*error.problems, switch]) from error
    if proof.difference is not None:
        raise ModelError(
            f"{name} under this plan does not compute what one device computes: it differs in {proof.difference}",
            f"see `meshtrain verify`{_way_out(case)}, or {switch}",
        )
    console.line(f"Proven: {proof.mesh.described()} computes what one device computes")
    write_json([proof], directory / PROOF_NAME)


def _way_out(case: ProofCase) -> str:
    separates = case.rows == "separate"
    return ', set data.documents = "joined" if it does not keep documents apart' if separates else ""
