"""The schemas for editors accept real files and refuse wrong ones."""

import tomllib

import pytest
from jsonschema import Draft202012Validator

from meshtrain.config.data import MixedSourceConfig, SourceConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.reading import shipped_plans
from meshtrain.config.run import RunConfig
from meshtrain.config.schema import described_schema, json_schema
from meshtrain.config.settings import field_docstrings
from meshtrain.config.toml import dump_toml, load_run

RUN = 'run_directory = "out"\nsteps = 3\nglobal_batch_size = 8\nmodel.type = "gpt2"\n'
LAUNCH_RUNS = shipped_plans().parent / "launch" / "runs"


def mistakes(kind: str, text: str) -> list[str]:
    return [error.message for error in Draft202012Validator(json_schema(kind)).iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("kind", ["run", "plan"])
def test_schemas_are_valid(kind):
    Draft202012Validator.check_schema(json_schema(kind))
    assert json_schema(kind)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("path", sorted(shipped_plans().rglob("*.toml")), ids=lambda path: path.stem)
def test_shipped_plans_are_accepted(path):
    assert mistakes("plan", path.read_text()) == []


@pytest.mark.parametrize("path", sorted(LAUNCH_RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_example_runs_are_accepted_and_load(path):
    assert mistakes("run", path.read_text()) == []
    assert load_run(path)


@pytest.mark.parametrize(
    "plan", ["", 'plan = "quickstart"', 'plan.extends = "quickstart"', "plan.mesh.tp = 2", 'extends = "base.toml"']
)
def test_every_spelling_of_a_run_is_accepted(plan):
    assert mistakes("run", RUN + plan) == []


def test_run_that_extends_another_may_omit_required_keys():
    assert mistakes("run", 'extends = "base.toml"') == []
    assert len(mistakes("run", "steps = 3")) == 1


def test_dumped_settings_are_accepted(write):
    assert mistakes("run", dump_toml(load_run(write()))) == []
    assert mistakes("plan", dump_toml(ParallelPlan())) == []


@pytest.mark.parametrize("mistake", ["plan.mesh.tq = 2", "plan = 3", "seed = 'x'", "plan.pipeline.schedule = '1F1b'"])
def test_mistakes_are_refused(mistake):
    assert mistakes("run", RUN + mistake)


def test_keys_are_described_by_their_docstrings():
    run, plan = described_schema("run"), described_schema("plan")

    assert run["properties"]["steps"]["description"] == field_docstrings(RunConfig)["steps"]
    assert run["properties"]["plan"]["description"].startswith("How the model is parallelized")
    assert (
        plan["$defs"]["MeshPlan"]["properties"]["pp"]["description"] == "Pipeline stages held by different processes."
    )
    assert plan["properties"]["extends"]["description"].startswith("The plan to start from")


def test_inherited_keys_are_described_too():
    inherited = set(MixedSourceConfig.model_fields) & set(SourceConfig.model_fields)
    assert inherited
    assert {*field_docstrings(MixedSourceConfig)} == {*MixedSourceConfig.model_fields}


def test_descriptions_change_nothing_else():
    bare, described = json_schema("plan"), described_schema("plan")
    assert "description" not in bare["$defs"]["MeshPlan"]["properties"]["pp"]
    assert described["$defs"]["MeshPlan"]["properties"]["pp"].pop("description")
    assert described["$defs"]["MeshPlan"]["properties"]["pp"] == bare["$defs"]["MeshPlan"]["properties"]["pp"]
