"""The metrics of a run: metrics.jsonl, TensorBoard and the screen show the same numbers."""

import json
import math
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshtrain.config.run import EvaluationConfig, ModelConfig, RunConfig
from meshtrain.console import TrainingProgress
from meshtrain.training.metrics import MetricsWriter
from tests.ranks import run_on_ranks
from tests.training.runs import VOCABULARY, Mesh, build_plan, build_run, read_metrics, train_here, write_text

STEP = {
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "trained_tokens",
    "tokens_per_second",
    "teraflops_per_second",
    "memory_bytes",
    "seconds",
    "data_seconds",
    "forward_backward_seconds",
    "optimizer_seconds",
}
EPOCH = {"step", "epoch", "epoch_steps"} | {
    f"epoch_{name}" for name in STEP - {"step", "epoch", "grad_norm", "learning_rate", "tokens", "trained_tokens"}
}
START = {"step", "parameters_checksum"}
EVALUATION = {"step", "eval_loss", "evaluation_seconds"}
CHECKPOINT = {"step", "checkpoint_seconds", "checkpoint"}
TAGS = (
    {"train/epoch", "train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "train/trained_tokens"}
    | {"train/tokens_per_second", "train/teraflops_per_second", "train/memory_bytes"}
    | {f"timing/{name}" for name in ("seconds", "data_seconds", "forward_backward_seconds", "optimizer_seconds")}
    | {"timing/evaluation_seconds", "timing/checkpoint_seconds", "evaluation/eval_loss"}
    | {f"epoch/{name}" for name in ("steps", "loss", "tokens_per_second", "memory_bytes", "seconds")}
    | {f"epoch/{name}" for name in ("teraflops_per_second", "data_seconds")}
    | {"epoch/forward_backward_seconds", "epoch/optimizer_seconds"}
)
# 6 FLOPs per matrix parameter, in 4 layers of width 32 and the head, and attention over 16 tokens.
FLOPS_PER_TOKEN = 6 * (4 * 12 * 32**2 + VOCABULARY * 32) + 4 * 6 * 16 * 32


def evaluated_run(directory: Path, mesh: Mesh) -> RunConfig:
    """Return a run of 6 steps, 3 per epoch, with evaluations every 2 and checkpoints every 3."""
    write_text(directory.parent / "text.jsonl", documents=28)
    config = build_run(directory, "gpt2", build_plan(mesh), form="padded", evaluation=EvaluationConfig(every=2))
    return config.model_copy(update={"data": config.data.model_copy(update={"validation": 0.2, "drop_last": False})})


def train_and_show(config: RunConfig) -> str:
    """Train on this rank, and return its standard output."""
    with redirect_stdout(StringIO()) as shown:
        train_here(config)
    return shown.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, list[str]]:
    """Return a run with 2 stages x 2 data ranks, and the output of its ranks."""
    config = evaluated_run(tmp_path_factory.mktemp("run") / "out", (2, 1, 2, 1))
    return config, run_on_ranks(4, train_and_show, config, joins=False)


def test_objects_have_their_keys_and_order(run: tuple[RunConfig, list[str]]) -> None:
    objects = read_metrics(Path(run[0].run_directory))
    kinds = {
        "parameters_checksum": START,
        "loss": STEP,
        "epoch_steps": EPOCH,
        "eval_loss": EVALUATION,
        "checkpoint_seconds": CHECKPOINT,
    }
    seen = [(metrics["step"], next(kind for kind in kinds if kind in metrics), metrics.keys()) for metrics in objects]
    assert [(step, kind) for step, kind, _ in seen] == [
        (0, "parameters_checksum"),
        (1, "loss"),
        (2, "loss"),
        (2, "eval_loss"),
        (3, "loss"),
        (3, "epoch_steps"),
        (3, "checkpoint_seconds"),
        (4, "loss"),
        (4, "eval_loss"),
        (5, "loss"),
        (6, "loss"),
        (6, "epoch_steps"),
        (6, "eval_loss"),
        (6, "checkpoint_seconds"),
    ]
    assert all(keys == kinds[kind] for _, kind, keys in seen)


def test_averages_of_an_epoch_are_those_of_its_steps(run: tuple[RunConfig, list[str]]) -> None:
    objects = read_metrics(Path(run[0].run_directory))
    for summary in (metrics for metrics in objects if "epoch_steps" in metrics):
        steps = [metrics for metrics in objects if "loss" in metrics and metrics["epoch"] == summary["epoch"]]
        assert summary["epoch_steps"] == len(steps) == 3
        for name in EPOCH - {"step", "epoch", "epoch_steps"}:
            average = sum(metrics[name.removeprefix("epoch_")] for metrics in steps) / 3
            assert summary[name] == pytest.approx(average)


def test_seconds_are_split_and_tokens_are_counted(run: tuple[RunConfig, list[str]]) -> None:
    steps = [metrics for metrics in read_metrics(Path(run[0].run_directory)) if "loss" in metrics]
    for number, metrics in enumerate(steps, start=1):
        parts = [metrics[f"{name}_seconds"] for name in ("data", "forward_backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) <= metrics["seconds"]
        assert metrics["tokens"] == number * 8 * 16
        assert metrics["trained_tokens"] < 8 * 16
        assert metrics["tokens_per_second"] == pytest.approx(8 * 16 / metrics["seconds"])
        flops = metrics["teraflops_per_second"] * 1e12 * 4 / metrics["tokens_per_second"]
        assert flops == pytest.approx(FLOPS_PER_TOKEN)


def test_output_starts_with_the_layout_of_the_run(run: tuple[RunConfig, list[str]]) -> None:
    lines = [" ".join(line.split()) for line in run[1][0].splitlines()]
    assert [line for line in lines if line.startswith(("pipeline", "shard", "offload", "stage ", "0 ", "1 "))] == [
        "pipeline 1F1B, layers per stage [2, 2]",
        "shard level 3 over 2 ranks, reshard after forward: never, gradients reduced each step",
        "stage ranks holds parameters per rank MB parameters MB gradients MB optimizer",
        "0 0-1 embedding, layers 0-1 36,032 18,016 0.14 0.14 0.29",
        "1 2-3 layers 2-3, head 35,072 17,536 0.14 0.14 0.28",
        "0 to 1 result of transformer.h.1 2 x 16 x 32 0.01 yes",
    ]
    batch = (
        "global batch 8 sequences = 2 per microbatch x 2 microbatches x 2 data-parallel; x 16 tokens = 128 tokens per"
    )
    start = lines.index(f"{batch} step")
    assert lines[start + 1] == f"6 steps into {run[0].run_directory}"
    assert re.fullmatch(
        r"Parameters checksum [0-9a-f]{16}; in two stages, because tied: lm_head\.weight", lines[start + 2]
    )


def test_rank_0_alone_prints_the_written_loss(run: tuple[RunConfig, list[str]]) -> None:
    """The loss is computed on the last stage and over all data ranks."""
    config, (first, *others) = run
    assert others == ["", "", ""]
    shown = re.findall(r"^step (\d+)/6  (loss|eval loss) ([\d.]+)", first, re.MULTILINE)
    written = [
        (str(metrics["step"]), kind.replace("_", " "), f"{metrics[kind]:.3f}")
        for metrics in read_metrics(Path(config.run_directory))
        for kind in ("loss", "eval_loss")
        if kind in metrics
    ]
    assert shown == written
    entropy = re.search(
        r"^Validation loss ([\d.]+) nats per token; the unigram entropy of the text is ([\d.]+), the loss of a "
        r"model that knows only token frequencies$",
        first,
        re.MULTILINE,
    )
    assert entropy is not None
    assert entropy[1] == written[-1][2]
    assert 0 < float(entropy[2]) < math.log(300)


def test_untrained_parameters_are_listed_once(tmp_path: Path) -> None:
    """mBART's decoder alone keeps its attention to an encoder that does not exist."""
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "dropout": 0.0}
    config = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), steps=2)
    model = ModelConfig(type="mbart", config={"vocab_size": VOCABULARY, "max_position_embeddings": 32, **sizes})
    (shown,) = run_on_ranks(1, train_and_show, config.model_copy(update={"model": model}), joins=False)
    attention = "model.decoder.layers.0.encoder_attn"
    names = [f"{attention}.{part}.{kind}" for part in ("k_proj", "out_proj") for kind in ("bias", "weight")]
    assert [line for line in shown.splitlines() if "gradient " in line.lower()] == [
        f"No gradient in the first step, so not trained (10): {', '.join(names)}, {attention}.q_proj.bias and 5 more"
    ]


def test_tensorboard_has_the_same_numbers(run: tuple[RunConfig, list[str]]) -> None:
    directory = Path(run[0].run_directory)
    events = read_events(directory)
    assert set(events.Tags()["scalars"]) == TAGS
    for tag, name in (("train/loss", "loss"), ("evaluation/eval_loss", "eval_loss"), ("epoch/loss", "epoch_loss")):
        written = [(metrics["step"], metrics[name]) for metrics in read_metrics(directory) if name in metrics]
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in written]


def read_events(directory: Path) -> EventAccumulator:
    """Read the events like TensorBoard."""
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def write_steps(directory: Path, first_step: int, last_step: int, *, scale: float = 1.0) -> None:
    """Write metrics like a run, in steps that a reader can see meanwhile."""
    progress = TrainingProgress(last_step, every=100)
    with MetricsWriter(directory, first_step=first_step, progress=progress, tensorboard=True) as writer:
        for step in range(first_step + 1, last_step + 1):
            writer.write(step, {**dict.fromkeys(STEP - {"step"}, scale), "epoch": 1})
        assert read_metrics(directory)[-1]["step"] == last_step
        assert read_events(directory).Scalars("train/loss")[-1].step == last_step
        assert writer.problem is None


def test_no_step_is_written_twice_after_a_resume(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "checkp')
    write_steps(tmp_path, 3, 6, scale=2.0)
    objects = read_metrics(tmp_path)
    assert [(metrics["step"], metrics["loss"]) for metrics in objects] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]
    scalars = [(scalar.step, scalar.value) for scalar in read_events(tmp_path).Scalars("train/loss")]
    assert scalars == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]


def test_restart_without_a_checkpoint_replaces_the_metrics(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 2)
    write_steps(tmp_path, 0, 1)
    assert [metrics["step"] for metrics in read_metrics(tmp_path)] == [1]
    assert [scalar.step for scalar in read_events(tmp_path).Scalars("train/loss")] == [1]


def test_unwritable_metrics_file_is_reported_and_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    progress = TrainingProgress(1, every=100)
    with MetricsWriter(tmp_path, first_step=0, progress=progress, tensorboard=True) as writer:
        assert writer.problem == f"cannot write metrics into {tmp_path}: File exists"
        writer.write(1, {"loss": 1.0, **dict.fromkeys(STEP - {"loss", "step"}, 0.0)})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1.0
