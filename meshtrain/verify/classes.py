"""`meshtrain verify --models`: every causal-LM type of the installed transformers, and what can be done with it."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshtrain import console
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, TensorPlan
from meshtrain.config.toml import with_family
from meshtrain.errors import ConfigError, UserError
from meshtrain.runtime.ranks import RankError
from meshtrain.verify.prove import prepare_ranks, prove
from meshtrain.verify.run import make_subject
from meshtrain.verify.tiny import default_config

# Each mesh proves one ability; the first two together, as every cut model is sharded too.
ABILITIES = {"pipeline x sharding": MeshPlan(pp=2, dp_shard=2), "tensor": MeshPlan(dp_shard=1, tp=2)}
PROVEN, REFUSED = "proven", "refused"
WRONG = ("differs", "fails")


@dataclass(frozen=True)
class Verdict:
    """What the class of one model type can do.

    Attributes:
        model_type: as transformers names it.
        architecture: its class.
        abilities: ability -> `proven`, or the reason why not.
    """

    model_type: str
    architecture: str
    abilities: dict[str, str]


def verify_models(model_types: Sequence[str], table: Path) -> bool:
    """Prove every class, show a line for each, and write the table.

    Args:
        model_types: empty: all.
        table: Markdown file to write.

    Returns:
        Whether each class is proven or refused: none differs, and none fails.
    """
    if unknown := sorted({*model_types} - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()):
        raise ConfigError(f"--type: transformers has no causal language model of the type {unknown[0]!r}")
    prepare_ranks()
    verdicts = []
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        verdicts.append(_verdict(model_type))
        shown = "; ".join(f"{ability}: {result}" for ability, result in verdicts[-1].abilities.items())
        console.line(f"{model_type}: {shown}")
    table.write_text("\n".join(_markdown(verdicts)) + "\n")
    for ability in ABILITIES:
        console.line(f"{ability}: {_count(verdicts, ability)}")
    return not any(result.startswith(WRONG) for verdict in verdicts for result in verdict.abilities.values())


def _verdict(model_type: str) -> Verdict:
    try:
        config = default_config(model_type)
    except Exception as error:  # noqa: BLE001 - a class may fail in its own code, in any way; the others go on
        name = _first(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        return Verdict(model_type, name, dict.fromkeys(ABILITIES, f"no tiny copy: {_last_line(error)}"))
    # Of a type whose class has eyes or ears the language model alone is proven, which has a class of its own.
    name = _first(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_type_of(config, model_type)])
    return Verdict(model_type, name, {ability: _prove(config, mesh) for ability, mesh in ABILITIES.items()})


def _type_of(config: PretrainedConfig, model_type: str) -> str:
    return config.model_type if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else model_type


def _first(architecture: str | tuple[str, ...]) -> str:
    return architecture if isinstance(architecture, str) else architecture[0]


def _prove(config: PretrainedConfig, mesh: MeshPlan) -> str:
    """Return what comes out, and if the initialisation is refused, what comes out without it."""
    result = _try(config, mesh, pretrained=False)
    if not result.startswith(REFUSED):
        # What differs, or fails, is wrong, and stays so whatever comes out without the initialisation.
        return result
    without = _try(config, mesh, pretrained=True)
    if without == PROVEN:
        return f"{PROVEN} from pretrained weights; {result}"
    return result if without.startswith(REFUSED) else f"{without}, from pretrained weights; {result}"


def _try(config: PretrainedConfig, mesh: MeshPlan, *, pretrained: bool) -> str:
    plan = with_family(ParallelPlan(tensor=TensorPlan()), config.model_type)
    try:
        proof = prove(make_subject(config, plan, mesh, attention="eager", pretrained=pretrained))
    except UserError as error:
        return f"{REFUSED}: {error.lines[0]}"
    except Exception as error:  # noqa: BLE001 - as above
        return f"fails: {_last_line(error)}"
    return PROVEN if proof.difference is None else f"differs in {proof.difference}"


def _last_line(error: Exception) -> str:
    said = str(error).strip().splitlines() or [""]
    # The last line of a rank's traceback names the exception already.
    return said[-1] if isinstance(error, (RankError, UserError)) else f"{type(error).__name__}: {said[-1]}"


def _count(verdicts: Sequence[Verdict], ability: str) -> str:
    """Return how many are proven, in words. Several types may share a class, which is proven if all of them are."""
    proven = [verdict for verdict in verdicts if verdict.abilities[ability].startswith(PROVEN)]
    others = {verdict.architecture for verdict in verdicts if verdict not in proven}
    classes = {verdict.architecture for verdict in verdicts}
    distinct = f"{len(classes - others)} of {len(classes)} distinct classes"
    words = f"proven are {len(proven)} of {len(verdicts)} model types ({distinct})"
    given = sum(verdict.abilities[ability] != PROVEN for verdict in proven)
    return f"{words}, {given} of them from pretrained weights only" if given else words


def _markdown(verdicts: Sequence[Verdict]) -> list[str]:
    versions = ", ".join(f"{library} {importlib.metadata.version(library)}" for library in ("torch", "transformers"))
    return [
        "# Which classes are proven",
        "",
        f"Written by `meshtrain verify --models` ({versions}): a tiny copy of every causal-LM model type, in float64,",
        "next to the stock model in one process; loss, gradients, parameters after 3 steps of AdamW and evaluation are",
        "at most 1e-12 apart. `pipeline x sharding` is pp 2 x dp_shard 2; `tensor` is tp 2.",
        "",
        " ".join(f"{ability}: {_count(verdicts, ability)}." for ability in ABILITIES),
        "",
        f"| model type | class | {' | '.join(ABILITIES)} |",
        "|---" * (2 + len(ABILITIES)) + "|",
        *(
            f"| {verdict.model_type} | {verdict.architecture} | {' | '.join(map(_cell, verdict.abilities.values()))} |"
            for verdict in verdicts
        ),
    ]


def _cell(result: str) -> str:
    return " ".join(result.split()).replace("|", "\\|")
