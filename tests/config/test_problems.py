"""Messages for a wrong file name the file, the key, what was expected and what was found."""

import pytest

from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError, Problem


def problems_of(write, text: str, *overrides: str, whole: bool = True) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_run(write(text=text, whole=whole), overrides)
    return caught.value.lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan.mesh.tq = 2", "plan.mesh.tq: unknown key; did you mean 'tp'?"),
        ("tp = 2", "tp: unknown key; did you mean 'plan.mesh.tp'?"),
        ("keep = 2", "keep: unknown key; did you mean 'checkpoint.keep'?"),
        (
            "plan.every = 2",
            "plan.every: unknown key; did you mean 'ema.every' or 'evaluation.every' or 'tasks.every' or "
            "'generate.every' or 'checkpoint.every' or 'logging.every' or 'plan.recompute.every'?",
        ),
        ("plan.mesh.zzz = 2", "plan.mesh.zzz: unknown key; the keys here are: pp, dp_replicate, dp_shard, ep, cp, tp"),
        ("optimiser.beta1 = 0.9", "optimiser: unknown key; did you mean 'optimizer'?"),
        (
            "logging.tensorboard = false",
            'logging.tensorboard: this key has been replaced; write logging.trackers = ["tensorboard"], or [] for no '
            "tracker",
        ),
    ],
)
def test_unknown_key_is_named_with_the_nearest(write, text, message):
    assert problems_of(write, text) == (f"run.toml: {message}",)


def test_unknown_key_is_named_relative_to_its_own_file(write):
    write("plan.toml", "tp = 2\nlearning_rate = 0.1", whole=False)

    assert problems_of(write, 'plan = "plan.toml"') == (
        "plan.toml: tp: unknown key; did you mean 'mesh.tp'?",
        "plan.toml: learning_rate: unknown key; the keys here are: model_types, mesh, pipeline, tensor, context, "
        "attention, shard, precision, recompute, compile, loss, extends",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 0.5", "seed: expected a whole number, found 0.5"),
        ("epochs = 0", "epochs: expected a whole number from 1, found 0"),
        ("epochs = true", "epochs: expected a whole number from 1, found true"),
        ("epochs.x = 1", "epochs: expected a whole number from 1, found a table"),
        ("data.shuffle = 'yes'", "data.shuffle: expected true or false, found the string 'yes'"),
        ("data.text_key = 1979-05-27", 'data.text_key: expected a string, found "1979-05-27"'),
        ("data.train = []", "data.train: expected a list of one or more strings, found []"),
        ("data.train = ['a', 1]", 'data.train: expected a list of one or more strings, found ["a", 1]'),
        (
            "logging.trackers = ['tensorboard', 'wanbd']",
            "logging.trackers: expected a list of 'tensorboard', 'wandb', 'mlflow' or 'trackio', found "
            """["tensorboard", "wanbd"]; did you mean 'wandb'?""",
        ),
        (
            "logging.trackers = [['wandb']]",
            "logging.trackers: expected a list of 'tensorboard', 'wandb', 'mlflow' or 'trackio', found [[\"wandb\"]]",
        ),
        ("logging.trackers = ['wandb', 'wandb']", "logging: `trackers` names wandb more than once; name each once"),
        ("data.validation = 1", "data.validation: expected a number from 0 below 1 or a list of strings, found 1"),
        ("data.tokenizer = 'gpt2'", "data.tokenizer: expected a table, found the string 'gpt2'"),
        (
            "optimizer.learning_rate = '1e-4'",
            "optimizer.learning_rate: expected a number above 0 up to 10, found the string '1e-4'",
        ),
        ("plan = 3", "plan: expected a string or a table, found 3"),
        ("plan.extends = 3", "plan.extends: expected a string, found 3"),
        ("extends.x = 3", "extends: expected a string, found a table"),
        (
            "plan.pipeline.layers_per_stage = 'evn'",
            "plan.pipeline.layers_per_stage: expected 'balanced', 'even' or a list of whole numbers from 0, found the "
            "string 'evn'; did you mean 'even'?",
        ),
        (
            "plan.pipeline.layers_per_stage = [1, 'x']",
            "plan.pipeline.layers_per_stage: expected 'balanced', 'even' or a list of whole numbers from 0, "
            'found [1, "x"]',
        ),
        (
            "plan.pipeline.schedule = '1F1b'",
            "plan.pipeline.schedule: expected 'GPipe', '1F1B', 'Interleaved1F1B', 'LoopedBFS', "
            "'InterleavedZeroBubble', 'ZBVZeroBubble' or 'DualPipeV', found the string '1F1b'; "
            "did you mean '1F1B'?",
        ),
        ("plan.shard.level = 'two'", "plan.shard.level: expected 1, 2 or 3, found the string 'two'"),
        (
            "plan.tensor.styles.'h.*.c_fc' = 'colwize'",
            "plan.tensor.styles.\"h.*.c_fc\": expected 'colwise', 'colwise_gather_output', 'rowwise', "
            "'embedding_rowwise', 'sequence_parallel', 'replicate', 'replicated_with_grad_allreduce', 'shared_input', "
            "'rowwise_split_input', 'replicated_heads', 'colwise_heads', 'rowwise_heads', 'per_head', "
            "'colwise_blocks', 'mla_kv_a_proj', 'shared_outputs', 'local_params', 'moe_tp_experts', 'expert_parallel' "
            "or 'whole_sequence', found the "
            "string 'colwize'; did you mean 'colwise'?",
        ),
    ],
)
def test_wrong_value_is_named_with_what_is_expected(write, text, message):
    assert problems_of(write, text) == (f"run.toml: {message}",)


def test_long_value_is_shortened(write):
    (line,) = problems_of(write, f"seed = '{'x' * 500}'")

    assert line == f"run.toml: seed: expected a whole number, found the string '{'x' * 56}..."


def test_missing_keys_are_attributed_to_the_file_that_was_opened(write):
    write("base.toml", "steps = 1", whole=False)

    assert problems_of(write, 'extends = "base.toml"\nmodel.type = "gpt2"', whole=False) == (
        "run.toml: run_directory: missing; expected a string",
        "run.toml: global_batch_size: missing; expected a whole number from 1",
    )


def test_misspelled_key_is_not_also_reported_as_missing(write):
    assert problems_of(write, "run_dir = 'x'\nglobal_batchsize = 3\nmodle.type = 'gpt2'\nsteps = 1", whole=False) == (
        "run.toml: run_dir: unknown key; did you mean 'run_directory'?",
        "run.toml: global_batchsize: unknown key; did you mean 'global_batch_size'?",
        "run.toml: modle: unknown key; did you mean 'model'?",
    )


def test_contradiction_is_attributed_to_the_files_that_set_the_keys(write):
    assert problems_of(write, "", "epochs=1", "run_directory=x") == (
        "run.toml, command line: `steps` and `epochs` are both set; set one",
    )
    assert problems_of(write, "", "model.path=gpt2") == (
        "run.toml, command line: model: `path` and `type` are both set; set one: where the model is, or its type",
    )
    assert problems_of(write, "", "steps=") == ("command line: neither `steps` nor `epochs` is set; set one",)


def test_what_was_found_is_kept_apart_from_the_advice(write):
    write("plan.toml", "mesh.tq = 2", whole=False)
    overrides = ("steps", "epochs=1", f"run_directory={'x' * 300}", "plan=plan.toml", "seed=18446744073709551616")
    with pytest.raises(ConfigError) as caught:
        load_run(write(), overrides)

    assert caught.value.problems == (
        Problem("cannot read 'steps'", "expected key=value, as in plan.mesh.tp=4", "command line"),
        Problem("a whole number of 65 bits, and TOML has at most 64", "use a smaller one", "command line: seed"),
        Problem(
            f"'{'x' * 37}...' has 300 bytes, and a file name has at most 255",
            "choose a shorter one",
            "command line: run_directory",
        ),
        Problem("unknown key", "did you mean 'tp'?", "plan.toml: mesh.tq"),
    )
    with pytest.raises(ConfigError) as caught:
        load_run(write(), ["epochs=1"])
    assert caught.value.problems == (Problem("`steps` and `epochs` are both set", "set one", "run.toml, command line"),)


def test_contradictions_within_a_table_are_refused(write):
    assert problems_of(write, 'data.tokenizer = { path = "x", vocab_size = 300 }') == (
        "run.toml: data.tokenizer: both `path` and `vocab_size` are set; set one: an existing tokenizer, or the size "
        "of a new one",
    )
    assert problems_of(write, "", "model.weights=pretrained") == (
        'command line: model: `weights` = "pretrained" needs `path`, the directory or hub id that holds them',
    )
    assert problems_of(write, "", "model.type=", "model.path=s3://bucket/model") == (
        "command line: model: `path` = 's3://bucket/model' is a URL; copy the model to a directory, and set `path` to "
        "that",
    )
    assert problems_of(write, "", "checkpoint.keep=0", "checkpoint.every=5") == (
        "command line: checkpoint: `keep` = 0 writes no checkpoint, but `every` is set; leave one of them out",
    )
    assert problems_of(write, "", "data.cache_directory=s3://bucket/cache") == (
        "command line: data.cache_directory: 's3://bucket/cache' is a URL, but token files are mapped into memory; set "
        "it to a local directory",
    )
    assert problems_of(write, "", "model.type=") == (
        "command line: model: neither `path` nor `type` is set; set one: where the model is, or its type",
    )
