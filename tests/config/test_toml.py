"""Runs and plans are merged from files and become settings."""

from itertools import combinations
from math import inf
from pathlib import Path

import pytest

from meshtrain.config.data import DataConfig, TokenizerConfig
from meshtrain.config.families import find_family, with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ParallelPlan, TensorPlan
from meshtrain.config.reading import shipped_plans
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.config.toml import dump_toml, load_plan, load_run, plan_hash
from meshtrain.errors import ConfigError

SHIPPED = sorted(
    path.relative_to(shipped_plans()).with_suffix("").as_posix() for path in shipped_plans().rglob("*.toml")
)


def test_run_file_becomes_settings(write, tmp_path):
    config = load_run(write())

    assert config == RunConfig(
        run_directory=str(tmp_path / "out"), steps=10, global_batch_size=8, model=ModelConfig(type="gpt2")
    )


def test_run_names_a_shipped_plan_in_either_spelling(write):
    short = load_run(write(text='plan = "families/gpt2"'))
    long = load_run(write(text='plan.extends = "families/gpt2"'))

    assert short.plan == long.plan == load_plan("families/gpt2")
    assert short.plan.tensor.styles["lm_head"] == "colwise_gather_output"


def test_keys_beside_extends_win_and_tables_merge_deeply(write):
    write("base.toml", '[mesh]\npp = 2\ntp = 2\n[tensor.styles]\n"a" = "colwise"\n"b" = "rowwise"', whole=False)
    write("top.toml", 'extends = "base.toml"\n[mesh]\ntp = 4\n[tensor.styles]\n"b" = "colwise"', whole=False)

    plan = load_plan("top.toml")

    assert plan.mesh == MeshPlan(pp=2, tp=4)
    assert plan.tensor.styles == {"a": "colwise", "b": "colwise"}


def test_lists_replace_lists(write):
    write("base.toml", 'model_types = ["a", "b"]\n[tensor.fused]\n"x" = ["q", "k"]\n"y" = ["r", "s"]', whole=False)
    write("top.toml", 'extends = "base.toml"\nmodel_types = ["c"]\n[tensor.fused]\n"x" = ["v"]', whole=False)

    plan = load_plan("top.toml")

    assert plan.model_types == ["c"]
    assert plan.tensor.fused == {"x": ["v"], "y": ["r", "s"]}


def test_run_extends_another_run(write):
    write("base.toml", 'plan = "families/gpt2"\nseed = 1')
    write("top.toml", 'extends = "base.toml"\nsteps = 20\nplan.mesh.tp = 2', whole=False)

    config = load_run("top.toml")

    assert (config.seed, config.steps, config.plan.mesh.tp) == (1, 20, 2)
    assert config.plan.model_types == ["gpt2"]


def test_extended_plan_replaces_the_plan_of_the_extended_run(write):
    write("base.toml", "plan.mesh.pp = 2")
    write("top.toml", 'extends = "base.toml"\nplan.extends = "families/gpt2"', whole=False)

    assert load_run("top.toml").plan == load_plan("families/gpt2")


def test_extends_is_relative_to_its_file(write):
    write("plans/deep/base.toml", "mesh.pp = 2", whole=False)
    write("plans/top.toml", 'extends = "deep/base.toml"', whole=False)
    write("runs/run.toml", 'plan = "../plans/top.toml"')

    assert load_run("runs/run.toml").plan.mesh.pp == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_plan_loads_by_name(name):
    assert load_plan(name) == load_plan(shipped_plans() / f"{name}.toml")


def test_plan_accepts_overrides_of_its_own_keys():
    assert load_plan("families/gpt2", ["mesh.tp=4", "pipeline.schedule=GPipe"]).mesh.tp == 4


def test_model_matches_one_family_only():
    families = [load_plan(name) for name in SHIPPED if name.startswith("families/")]

    for one, other in combinations(families, 2):
        assert not {*one.model_types} & {*other.model_types}
    for family in families:
        assert all(find_family(model_type) == family for model_type in family.model_types)


def test_unknown_model_type_has_no_family():
    plan = ParallelPlan(mesh=MeshPlan(tp=2))

    assert find_family("rwkv") is None
    assert with_family(plan, "rwkv") is plan


def test_family_sets_tensor_rules_only():
    plan = ParallelPlan(mesh=MeshPlan(tp=2), tensor=TensorPlan(sequence_parallel=True))
    family = find_family("gpt2")

    filled = with_family(plan, "gpt2")

    assert filled.tensor.styles == family.tensor.styles
    assert filled.tensor.fused == family.tensor.fused
    assert filled.tensor.local_attributes == family.tensor.local_attributes
    assert filled.tensor.sequence_parallel
    assert filled.model_copy(update={"tensor": plan.tensor}) == plan


def test_plan_with_its_own_styles_is_unchanged():
    plan = ParallelPlan(tensor=TensorPlan(styles={"lm_head": "colwise"}))

    assert with_family(plan, "gpt2") is plan


def test_dumped_run_loads_back_equal(write, tmp_path):
    config = RunConfig(
        run_directory=str(tmp_path / "out"),
        epochs=3,
        global_batch_size=8,
        model=ModelConfig(
            type="gpt2", config={"n_layer": 2, "activation_function": 'a "quoted" one', "rates": [0.1, 2]}
        ),
        data=DataConfig(train=[str(tmp_path / "*.jsonl")], validation=0.1, tokenizer=TokenizerConfig(vocab_size=300)),
        optimizer=OptimizerConfig(max_gradient_norm=inf, epsilon=1e-8),
        plan=load_plan("families/gpt2", ["mesh.tp=2", "pipeline.layers_per_stage=[1, 1]"]),
    )

    assert load_run(write("dumped.toml", dump_toml(config), whole=False)) == config


@pytest.mark.parametrize("name", SHIPPED)
def test_dumped_plan_loads_back_equal(name, write):
    plan = load_plan(name)

    assert load_plan(write("dumped.toml", dump_toml(plan), whole=False)) == plan


def test_plan_hash_depends_on_the_settings_and_not_on_their_order(write):
    write("a.toml", '[tensor.styles]\n"a" = "colwise"\n"b" = "rowwise"\n[mesh]\npp = 2\ntp = 1', whole=False)
    write("b.toml", 'extends = "c.toml"\n[mesh]\npp = 2\n[tensor.styles]\n"b" = "rowwise"', whole=False)
    write("c.toml", '[tensor.styles]\n"a" = "colwise"', whole=False)

    assert plan_hash(load_plan("a.toml")) == plan_hash(load_plan("b.toml"))
    assert plan_hash(load_plan("a.toml")) != plan_hash(load_plan("c.toml"))
    assert len(plan_hash(ParallelPlan())) == 12


def test_load_plan_and_load_run_raise_a_config_error(write):
    write("plan.toml", "mesh.tq = 2", whole=False)

    with pytest.raises(ConfigError, match=r"plan\.toml: mesh\.tq: unknown key; did you mean 'tp'\?"):
        load_plan("plan.toml")
    with pytest.raises(ConfigError, match=r"plan\.toml: mesh\.tq: unknown key; did you mean 'tp'\?"):
        load_run(write(text='plan = "plan.toml"'))


def test_load_accepts_path_objects_and_strings(write):
    assert load_run(str(write())) == load_run(Path("run.toml"))
