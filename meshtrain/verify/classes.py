"""The command `meshtrain verify --models`: it proves every causal-LM type of transformers."""

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshtrain import console
from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, TensorPlan
from meshtrain.errors import ConfigError, UserError
from meshtrain.models.build import build_meta_model
from meshtrain.models.tiny import default_config
from meshtrain.parallel.experts.stacks import expert_stacks
from meshtrain.runtime.ranks import RankError
from meshtrain.verify.case import ProofCase
from meshtrain.verify.compare import TOLERANCE
from meshtrain.verify.dropout import DropoutProof, drops_attention, prove_dropout
from meshtrain.verify.prove import Proof, prove, prove_together, quiet_ranks
from meshtrain.verify.record import RECORD_NAME, record_of, write_record
from meshtrain.verify.variants import Values, attention_heads, cover_pairs, find_flags, flags_text
from meshtrain.verify.verify_run import make_case

# Each mesh proves one ability. Pipeline and sharding share one, because every cut model is sharded
# too.
TENSOR = MeshPlan(dp_shard=1, tp=2)
ABILITIES = {"pipeline x sharding": MeshPlan(pp=2, dp_shard=2), "tensor": TENSOR}
# Under sequence parallelism where it applies.
TOGETHER = "pipeline x tensor"
BOTH = MeshPlan(pp=2, dp_shard=1, tp=2)
# Dropout masks differ between meshes, so the plan is measured against itself.
DROPOUT = "tensor with dropout"
# Each sequence in parts, and experts on two processes.
CONTEXT, EXPERTS = "context", "experts"
IN_PARTS, APART = MeshPlan(dp_shard=1, cp=2), MeshPlan(dp_shard=1, ep=2)
COLUMNS = (*ABILITIES, TOGETHER, CONTEXT, EXPERTS, DROPOUT)
FLAGS = "tensor, with flags"
TENSOR_DEFAULTS = TensorPlan()
PROVEN, REFUSED = "proven", "refused"
GIVEN, WITHOUT = f"{PROVEN} from pretrained weights", " without sequence parallelism"
WRONG = ("differs", "fails")


@dataclass(frozen=True)
class Variants:
    """The results with flags that are not the defaults.

    Attributes:
        flags: those that change what the model computes.
        tried: number of variants, with the defaults.
        proven: number of variants that are proven.
        others: flags of what is refused, or wrong -> the reason.
        record: what `write_record` keeps; empty if the flags are refused.
        refusal: why flags were not looked for, if there is no tiny copy with all kinds of layers.
    """

    flags: tuple[str, ...]
    tried: int
    proven: int
    others: dict[str, str]
    record: dict[str, Any]
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return self.refusal
        if not self.flags:
            return "no flag changes what it computes"
        found = [f"{self.proven} of {self.tried} variants of {', '.join(self.flags)} are proven"]
        return "; ".join([*found, *(f"{flags}: {reason}" for flags, reason in self.others.items())])


@dataclass(frozen=True)
class Verdict:
    """The result for the class of one model type.

    Attributes:
        model_type: as transformers names it.
        architecture: its class.
        abilities: ability -> `proven`, or the reason why not.
        variants: results with other flags under tensor parallelism; None if these were not tried.
    """

    model_type: str
    architecture: str
    abilities: dict[str, str]
    variants: Variants | None = None


@quiet_ranks()
def verify_models(model_types: Sequence[str], table: Path, *, only_defaults: bool = False) -> bool:
    """Prove every class in variants of its configuration, print a line for each, write the table.

    Args:
        model_types: empty: all.
        table: Markdown file to write. A JSON file with the proven flags is written beside it.
        only_defaults: leave out the variants and the JSON file.

    Returns:
        Whether each class is proven or refused: none differs, and none fails.
    """
    if unknown := sorted({*model_types} - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()):
        raise ConfigError(f"--type: transformers has no causal language model of the type {unknown[0]!r}")
    verdicts = []
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        verdicts.append(_verdict(model_type, only_defaults=only_defaults))
        results = [f"{ability}: {result}" for ability, result in verdicts[-1].abilities.items()]
        if (variants := verdicts[-1].variants) is not None:
            results.append(f"{FLAGS}: {variants}")
        console.line(f"{model_type}: {'; '.join(results)}")
    table.write_text("\n".join(_markdown(verdicts)) + "\n")
    if not only_defaults:
        records = {v.model_type: v.variants.record for v in verdicts if v.variants and v.variants.record}
        write_record(records, table.with_name(RECORD_NAME))
    for ability in COLUMNS:
        console.line(f"{ability}: {_count(verdicts, ability)}")
    results = [result for verdict in verdicts for result in verdict.abilities.values()]
    results += [result for verdict in verdicts if verdict.variants for result in verdict.variants.others.values()]
    return not any(result.startswith(WRONG) for result in results)


def _verdict(model_type: str, *, only_defaults: bool) -> Verdict:
    try:
        config = default_config(model_type)
    except Exception as error:  # noqa: BLE001 - a class may fail in its own code, in any way; the others go on
        name = _first(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        return Verdict(model_type, name, dict.fromkeys(COLUMNS, f"no tiny copy: {_last_line(error)}"))
    # Of a multimodal type only the language model is proven, which has a class of its own.
    name = _first(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_type_of(config, model_type)])
    abilities = {ability: _prove(config, mesh) for ability, mesh in ABILITIES.items()}
    abilities[TOGETHER] = prove_both(config)
    abilities[CONTEXT] = _prove(config, IN_PARTS)
    abilities[EXPERTS] = prove_experts(config)
    abilities[DROPOUT] = _drop(config)
    # The flags of a model inside another are not those of the type.
    is_part = config.get_text_config() is not config
    if only_defaults or is_part or not abilities["tensor"].startswith(PROVEN):
        return Verdict(model_type, name, abilities)
    pretrained = abilities["tensor"].startswith(GIVEN)
    return Verdict(model_type, name, abilities, prove_variants(_type_of(config, model_type), pretrained=pretrained))


def prove_variants(model_type: str, *, pretrained: bool) -> Variants:
    """Prove a type over tp with its flags, each pair of their values at least once.

    Args:
        model_type: of a language model whose defaults are proven.
        pretrained: whether the defaults are proven from given weights only.
    """
    try:
        flags = find_flags(model_type)
    except UserError as error:
        return Variants((), 0, 0, {}, {}, f"{REFUSED}: {error.lines[0]}")
    refused: dict[str, str] = {}

    def is_possible(values: Values) -> bool:
        try:
            _case(default_config(model_type, values), TENSOR, pretrained=True)
        except UserError as error:
            refused[flags_text(values)] = f"{REFUSED}: {error.lines[0]}"
            return False
        return True

    variants, impossible = cover_pairs(flags.values, is_possible)
    changed = [variant for variant in variants if variant]
    found = _prove_each([default_config(model_type, variant) for variant in changed], pretrained=pretrained)
    results = dict(zip(map(flags_text, changed), found, strict=True))
    proven = [v for v in variants if not v or results[flags_text(v)].startswith(PROVEN)]
    others = {flags_text(values): refused[flags_text(values)] for values in impossible}
    others |= {flags: result for flags, result in results.items() if not result.startswith(PROVEN)}
    heads = attention_heads(default_config(model_type))
    return Variants(tuple(flags.values), len(variants), len(proven), others, record_of(flags, proven, heads))


def _prove_each(configs: Sequence[PretrainedConfig], *, pretrained: bool) -> list[str]:
    """Return the result for each configuration of one class.

    All are proven in the same processes, unless one of them fails.
    """
    cases = [_case(config, TENSOR, pretrained=pretrained) for config in configs]
    try:
        proofs = prove_together(cases) if cases else []
    except RankError:
        return [_try(config, TENSOR, TENSOR_DEFAULTS, pretrained=pretrained) for config in configs]
    return [_result(proof) for proof in proofs]


def _type_of(config: PretrainedConfig, model_type: str) -> str:
    return config.model_type if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else model_type


def _first(architecture: str | tuple[str, ...]) -> str:
    return architecture if isinstance(architecture, str) else architecture[0]


def prove_both(config: PretrainedConfig) -> str:
    """Return the result over pipeline and tensor, with sequence parallelism where it applies."""
    split = TensorPlan(sequence_parallel=True)
    result = _prove(config, BOTH, split)
    if not result.startswith(REFUSED) or "sequence_parallel" not in result:
        return result
    without = _prove(config, BOTH)
    return f"{without}{WITHOUT}; {result}" if without.startswith(PROVEN) else without


def prove_experts(config: PretrainedConfig) -> str:
    """Return the result with the experts on two processes."""
    try:
        model = build_meta_model(config, dtype=torch.float32, attention="eager")
    except Exception:  # noqa: BLE001 - the proof fails in the same way, and reports it
        return _prove(config, APART)
    return _prove(config, APART) if expert_stacks(model) else "has no stacked experts"


def _prove(config: PretrainedConfig, mesh: MeshPlan, tensor: TensorPlan = TENSOR_DEFAULTS) -> str:
    """Return the result; if the initialization is refused, that with given weights."""
    result = _try(config, mesh, tensor, pretrained=False)
    if not result.startswith(REFUSED):
        # If it differs or fails, it is wrong, whatever the result without the initialization.
        return result
    without = _try(config, mesh, tensor, pretrained=True)
    if without.startswith(PROVEN):
        return f"{GIVEN}; {result}"
    return result if without.startswith(REFUSED) else f"{without}, from pretrained weights; {result}"


def _try(config: PretrainedConfig, mesh: MeshPlan, tensor: TensorPlan, *, pretrained: bool) -> str:
    return _reported(lambda: prove(_case(config, mesh, tensor, pretrained=pretrained)))


def _drop(config: PretrainedConfig) -> str:
    if not drops_attention(config):
        return "has no attention dropout"
    return _reported(lambda: prove_dropout(_case(config, TENSOR, pretrained=True)))


def _reported(make: Callable[[], Proof | DropoutProof]) -> str:
    try:
        proof = make()
    except UserError as error:
        return f"{REFUSED}: {error.lines[0]}"
    except Exception as error:  # noqa: BLE001 - as above
        return f"fails: {_last_line(error)}"
    return _result(proof)


def _result(proof: Proof | DropoutProof) -> str:
    if proof.difference is not None:
        return f"differs in {proof.difference}"
    rounding = [it.error for it in getattr(proof, "findings", ()) if it.tolerance and it.error > TOLERANCE]
    return f"{PROVEN} within rounding ({max(rounding):.0e})" if rounding else PROVEN


def _case(
    config: PretrainedConfig, mesh: MeshPlan, tensor: TensorPlan = TENSOR_DEFAULTS, *, pretrained: bool
) -> ProofCase:
    plan = with_family(ParallelPlan(tensor=tensor), config.model_type)
    return make_case(config, plan, mesh, attention="eager", pretrained=pretrained)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    # The last line of a rank's traceback already names the exception.
    return lines[-1] if isinstance(error, (RankError, UserError)) else f"{type(error).__name__}: {lines[-1]}"


def _count(verdicts: Sequence[Verdict], ability: str) -> str:
    """Return the number of proven types as text.

    Several types may share a class, which is proven if all of them are.
    """
    proven = [verdict for verdict in verdicts if verdict.abilities[ability].startswith(PROVEN)]
    others = {verdict.architecture for verdict in verdicts if verdict not in proven}
    classes = {verdict.architecture for verdict in verdicts}
    distinct = f"{len(classes - others)} of {len(classes)} distinct classes"
    summary = f"proven are {len(proven)} of {len(verdicts)} model types ({distinct})"
    given = sum(verdict.abilities[ability].startswith(GIVEN) for verdict in proven)
    without = sum(WITHOUT in verdict.abilities[ability] for verdict in proven)
    notes = [f"{given} of them from pretrained weights only"] if given else []
    notes += [f"{without} of them{WITHOUT}"] if without else []
    return ", ".join([summary, *notes])


def _markdown(verdicts: Sequence[Verdict]) -> list[str]:
    versions = ", ".join(f"{library} {importlib.metadata.version(library)}" for library in ("torch", "transformers"))
    return [
        "# Which classes are proven",
        "",
        f"`meshtrain verify --models` wrote this table ({versions}). It trains a tiny copy of every causal-LM model",
        "type in float64: under a plan, and as the stock model in one process. A type is proven if loss, gradients,",
        "parameters after 3 steps of AdamW and evaluation loss differ by at most 1e-12, or by what one bit in its",
        "weights changes in the stock model, at most 1e-9. `pipeline x sharding` is pp 2 x dp_shard 2; `tensor` is",
        "tp 2; `pipeline x tensor` is pp 2 x tp 2, with sequence parallelism where the hidden states can be split;",
        "`context` is cp 2; `experts` is ep 2.",
        "`tensor, with flags` is tp 2 again, in variants of the configuration: every boolean and choice that changes",
        "what the model computes, and how many heads share keys and values.",
        "Each pair of values occurs at least once. `-` means that this was not tried. `variants.json` keeps the",
        "proven flags, for the check before a run.",
        "`tensor with dropout` is tp 2 with every dropout at 0.2: the gradient is the derivative of the loss along a",
        "random direction, by finite differences up to 1e-6 of its norm, and replicas are bit-equal after 5 steps.",
        "",
        " ".join(f"{ability}: {_count(verdicts, ability)}." for ability in COLUMNS),
        "",
        f"| model type | class | {' | '.join(COLUMNS)} | {FLAGS} |",
        "|---" * (3 + len(COLUMNS)) + "|",
        *map(_row, verdicts),
    ]


def _row(verdict: Verdict) -> str:
    cells = [verdict.model_type, verdict.architecture, *verdict.abilities.values()]
    return f"| {' | '.join(map(_cell, [*cells, '-' if verdict.variants is None else str(verdict.variants)]))} |"


def _cell(result: str) -> str:
    return " ".join(result.split()).replace("|", "\\|")
