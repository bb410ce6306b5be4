"""A class that nothing has proven yet is proven before its first training run; the answer is kept."""

from importlib.metadata import version
from pathlib import Path

from meshtrain import console
from meshtrain.config.run import RunConfig
from meshtrain.config.toml import find_family, plan_hash
from meshtrain.data.cache import Cache, identity_of
from meshtrain.errors import ModelError
from meshtrain.models.build import load_hf_config
from meshtrain.runtime.environment import rank_from_environment
from meshtrain.verify.prove import prepare_ranks, prove, write_json
from meshtrain.verify.run import make_subjects
from meshtrain.verify.subject import Subject

PROOF_NAME = "proof.json"


def ensure_proven(config: RunConfig) -> None:
    """Prove the plan of a run once, if its model is of a class that no shipped family is written for.

    All processes of a run call this at once: one of them works and the others wait for it.

    Raises:
        ModelError: if the plan does not compute what one device computes.
    """
    if not config.model.prove_unknown_class or find_family(load_hf_config(config.model).model_type) is not None:
        return
    cache = Cache(Path(config.data.cache_directory), leads=rank_from_environment() == 0)
    for subject in make_subjects(config):
        cache.build(f"proofs/{_key(subject)}", lambda directory, subject=subject: _prove(subject, directory))  # type: ignore[misc]


def _key(subject: Subject) -> str:
    versions = [version(library) for library in ("torch", "transformers", "meshtrain")]
    return identity_of(subject.architecture, versions, plan_hash(subject.plan), *_choices(subject))


def _choices(subject: Subject) -> tuple[bool | str, ...]:
    return subject.padded, subject.attention, subject.pretrained


def _prove(subject: Subject, directory: Path) -> None:
    console.line(f"{subject.architecture} is new here: proving the plan on a tiny copy of it")
    prepare_ranks()
    proof = prove(subject)
    if not proof.holds:
        finding = next(finding for finding in proof.findings if not finding.holds)
        raise ModelError(
            f"{subject.architecture} under this plan does not compute what one device computes: {finding.what} "
            f"differs by {finding.error:.0e} at {finding.where}; see `meshtrain verify`, or set "
            "model.prove_unknown_class = false to train all the same"
        )
    write_json([proof], directory / PROOF_NAME)
