"""Bad steps in real runs: each policy, its limits and messages, and resuming."""

import json
import math
import re
from collections.abc import Set
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from pydantic import ValidationError

from meshtrain.checkpoint.manifest import Manifest, SavedHistory, read_manifest
from meshtrain.checkpoint.storage.directory import CHECKPOINTS_NAME, MANIFEST_NAME, list_checkpoints
from meshtrain.config.data import MixedSourceConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.run import BadStepsConfig, CheckpointConfig, RunConfig
from meshtrain.data.prepare import prepare_data
from meshtrain.data.samples.dataset import build_dataset
from meshtrain.errors import TrainingStopped, UserError
from meshtrain.models.layout import local_tensor
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.ranks import RankError
from meshtrain.training.history import StepHistory, robust_z_score
from tests.ranks import run_on_ranks
from tests.training.runs import WORDS, build_plan, build_run, read_metrics, samples_seen, steps_of, train_here
from tests.training.test_resume import Seen, assert_same_bits, stopped_after

SKIP = BadStepsConfig(policy="skip")
REWIND = BadStepsConfig(policy="rewind")
EVERY_2 = CheckpointConfig(every=2, keep=9)


def train_with_bad_samples(config: RunConfig, bad: Set[int]) -> tuple[list[dict[str, Any]], str, str]:
    """Train on this rank; with a bad sample, a gradient of the last rank is not finite.

    Returns:
        The inputs of each step, the output, and the reason of a stop, if any.
    """
    from meshtrain.training import loop
    from meshtrain.training import step as step_module

    step_of_product, finish = loop.train_step, step_module.finish_gradients
    samples: set[int] = set()

    def noted(context: Any, step: int, batch: Any, sample_ids: np.ndarray) -> Any:
        samples.clear()
        samples.update(sample_ids.tolist())
        return step_of_product(context, step, batch, sample_ids)

    def finish_poisoned(pipeline: Pipeline) -> None:
        if bad & samples and dist.get_rank() == dist.get_world_size() - 1:
            parameter = next(p for _, p in pipeline.named_parameters() if p.dim() == 2)
            assert parameter.grad is not None
            local_tensor(parameter.grad).view(-1)[:1] = torch.nan
        finish(pipeline)

    loop.train_step, step_module.finish_gradients = noted, finish_poisoned
    seen, message = [], ""
    with redirect_stdout(StringIO()) as shown:
        try:
            seen = train_here(config)
        except TrainingStopped as error:
            message = str(error)
    return seen, shown.getvalue(), message


def train_on_ranks(config: RunConfig, bad: Set[int] = frozenset()) -> tuple[Seen, str, str]:
    """Train on as many ranks as the plan needs; a repeated step counts as the last time."""
    mesh = config.plan.mesh
    world_size = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp
    answers = run_on_ranks(world_size, train_with_bad_samples, config, bad, joins=False)
    assert len({message for *_, message in answers}) == 1
    return samples_seen([seen for seen, *_ in answers]), answers[0][1], answers[0][2]


def out(config: RunConfig) -> Path:
    return Path(config.run_directory)


def notes(config: RunConfig) -> list[dict[str, Any]]:
    return [metrics for metrics in read_metrics(out(config)) if "bad_step" in metrics]


def losses(config: RunConfig) -> list[float]:
    return [step["loss"] for step in steps_of(out(config))]


def ids(seen: Seen) -> dict[int, list[int]]:
    return {step: sample_ids for step, (sample_ids, _) in seen.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[int, list[int]]]:
    """Return a run of 8 steps without a bad one, and its samples."""
    config = build_run(
        tmp_path_factory.mktemp("runs") / "whole", "gpt2", build_plan((2, 1, 1, 1)), steps=8, checkpoint=EVERY_2
    )
    seen, _, message = train_on_ranks(config)
    assert not message
    return config, ids(seen)


def beside(config: RunConfig, name: str, **changes: Any) -> RunConfig:
    """Return the same run in another directory."""
    return config.model_copy(update={"run_directory": str(out(config).with_name(name)), **changes})


# Policies


def test_bad_step_is_skipped_and_counted(undisturbed: tuple[RunConfig, dict[int, list[int]]]) -> None:
    whole, samples = undisturbed
    config = beside(whole, "skip", bad_steps=SKIP)
    seen, shown, message = train_on_ranks(config, {samples[2][0]})
    assert not message
    # Training continues with the next batch, and the parameters are unchanged.
    assert ids(seen) == samples
    assert losses(config)[:3] == losses(whole)[:3]
    assert losses(config)[3] != losses(whole)[3]
    assert [step["bad_steps"] for step in steps_of(out(config))] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [step["grad_norm"] for step in steps_of(out(config))][2] is None
    fault = f"the loss is {losses(config)[2]}, the gradient norm nan"
    assert notes(config) == [
        {"step": 3, "bad_step": 3, "fault": fault, "samples": samples[2], "answer": "skip", "times": 1}
    ]
    assert (
        f"Step 3 is bad, and skipped: {fault}. Samples: {', '.join(map(str, samples[2]))}. Skipped so far: 1" in shown
    )
    manifest = read_manifest(list_checkpoints(out(config) / CHECKPOINTS_NAME)[0])
    assert (manifest.step, manifest.skipped_steps) == (8, 1)
    resumed = stopped_after(config, 4, "skip-4")
    train_on_ranks(resumed)
    assert_same_bits(config, resumed)


def test_too_many_consecutive_bad_steps_end_a_run_that_skips(
    undisturbed: tuple[RunConfig, dict[int, list[int]]],
) -> None:
    """Two bad steps in a row are allowed; a good step between resets the count."""
    whole, samples = undisturbed
    config = beside(whole, "skips", bad_steps=BadStepsConfig(policy="skip", max_skips=2))
    bad = {samples[step][0] for step in (0, 1, 3, 4, 5)}
    _, _, message = train_on_ranks(config, bad)
    assert [note["step"] for note in notes(config)] == [1, 2, 4, 5]
    assert message.startswith("step 6: the loss is ")
    assert (
        "the gradient norm nan; 2 bad steps in a row were skipped before it, and bad_steps.max_skips is 2;" in message
    )
    assert message.endswith("set optimizer.max_gradient_norm, or raise bad_steps.max_skips")
    # The bad_steps settings may change on resume; the checkpoint of step 4 stores the earlier
    # count.
    assert not train_on_ranks(config.model_copy(update={"bad_steps": BadStepsConfig(policy="skip", max_skips=3)}), bad)[
        2
    ]
    assert [step["bad_steps"] for step in steps_of(out(config))] == [1, 2, 2, 3, 4, 5, 5, 5]


def test_rewind_omits_the_bad_batch_on_every_mesh(undisturbed: tuple[RunConfig, dict[int, list[int]]]) -> None:
    whole, samples = undisturbed
    bad = {samples[3][5], samples[6][0]}
    saving = CheckpointConfig(every=2, keep=9, in_background=True)
    config = beside(whole, "rewind", bad_steps=REWIND, checkpoint=saving, steps=6)
    seen, shown, message = train_on_ranks(config, bad)
    assert not message
    found = ids(seen)
    assert [found[step] for step in range(6)] == [samples[place] for place in (0, 1, 2, 4, 5, 7)]
    steps = steps_of(out(config))
    assert [step["step"] for step in steps] == list(range(1, 7))
    assert [step["bad_steps"] for step in steps] == [0, 0, 1, 1, 2, 2]
    assert losses(config)[:3] == losses(whole)[:3]
    assert [(note["step"], note["bad_step"], note["samples"], note["times"]) for note in notes(config)] == [
        (2, 4, samples[3], 1),
        (4, 6, samples[6], 2),
    ]
    back = f"Step 4 is bad: {notes(config)[0]['fault']}. The run goes back to {out(config)}/checkpoints/step-2, and"
    without = f"continues without the samples of that step: {', '.join(map(str, samples[3]))}. "
    assert f"{back} {without}Batches left out so far: 1" in shown
    histories = [read_manifest(path).history for path in list_checkpoints(out(config) / CHECKPOINTS_NAME)]
    assert [history and history.left_out for history in histories] == [(3, 6), (3,), None]

    # Killed between the two steps, on the same mesh; killed before the first, on another mesh.
    resumed = stopped_after(config, 4, "rewind-4")
    assert ids(train_on_ranks(resumed, bad)[0]) == {step: found[step] for step in (4, 5)}
    assert_same_bits(config, resumed)
    elsewhere = stopped_after(config, 2, "rewind-2").model_copy(update={"plan": build_plan((1, 1, 1, 2))})
    assert ids(train_on_ranks(elsewhere, bad)[0]) == {step: found[step] for step in (2, 3, 4, 5)}
    assert losses(elsewhere) == pytest.approx(losses(config), rel=1e-12)


def test_rewinds_are_limited_and_need_a_checkpoint(undisturbed: tuple[RunConfig, dict[int, list[int]]]) -> None:
    whole, samples = undisturbed
    alone = {"plan": build_plan((1, 1, 1, 1)), "bad_steps": BadStepsConfig(policy="rewind", max_rewinds=1)}
    config = beside(whole, "rewinds", **alone)
    _, _, message = train_on_ranks(config, {samples[2][0], samples[3][0]})
    assert [note["bad_step"] for note in notes(config)] == [3]
    assert message.startswith("step 3: the loss is ")
    assert "gradient norm nan; rewinds before it: 1, and bad_steps.max_rewinds is 1; stopped" in message
    assert message.endswith("set optimizer.max_gradient_norm, or raise bad_steps.max_rewinds")

    config = beside(whole, "nowhere", **alone)
    _, _, message = train_on_ranks(config, {samples[1][0]})
    assert message.startswith("step 2: the loss is ")
    assert message.endswith(
        f"the gradient norm nan; there is no checkpoint yet to go back to. Samples of this step: "
        f"{', '.join(map(str, samples[1]))}; look at them, lower optimizer.learning_rate or checkpoint.every, or set "
        'bad_steps.policy to "skip"'
    )


def test_rewind_does_not_repeat_sources_that_end(undisturbed: tuple[RunConfig, dict[int, list[int]]]) -> None:
    whole, _ = undisturbed
    sources = {"all": MixedSourceConfig(train=whole.data.train, repeat=False)}
    data = whole.data.model_copy(update={"sources": sources, "sequence_length": 32})
    feed = build_dataset(prepare_data(data), global_batch_size=whole.global_batch_size, seed=whole.seed)
    steps = feed.order.num_steps
    assert steps is not None
    alone = {"plan": build_plan((1, 1, 1, 1)), "bad_steps": REWIND, "data": data}
    bad = set(feed.order.sample_ids(2)[:1].tolist())

    _, _, message = train_on_ranks(beside(whole, "ending", steps=steps, **alone), bad)
    assert message.startswith("step 3: the loss is ")
    assert "; this batch cannot be left out\n" in message
    assert f"\ndata.sources: all sources end after {steps - 1:,} steps without the" in message

    config = beside(whole, "ending-before", steps=steps - 1, **alone)
    seen, _, message = train_on_ranks(config, bad)
    assert not message
    shown = [sample for of_step in ids(seen).values() for sample in of_step]
    assert len(shown) == len(set(shown)) == 8 * (steps - 1)
    with pytest.raises(RankError, match=rf"after {steps - 1:,} steps without the batches that rewinds leave out \(1\)"):
        train_on_ranks(config.model_copy(update={"steps": steps}))


# Spikes


def test_unusual_document_is_a_spike_and_ordinary_text_is_not(tmp_path: Path) -> None:
    """The text is learned in order; a document of other letters is in batches 15 and 16."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, 20)) for _ in range(100)]
    texts.insert(60, "".join(map(chr, draw.integers(0x100, 0x800, 90))))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = build_run(
        tmp_path / "whole",
        "gpt2",
        build_plan((1, 1, 2, 1)),
        steps=20,
        bad_steps=BadStepsConfig(policy="rewind", spike_z_score=5, window=10),
        checkpoint=CheckpointConfig(every=3, keep=9),
        optimizer=OptimizerConfig(learning_rate=2e-3, epsilon=1e-4),
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"shuffle": False})})
    seen, _, message = train_on_ranks(config)
    assert not message
    found = notes(config)
    assert [(note["step"], note["bad_step"]) for note in found] == [(15, 16), (15, 16)]
    assert all(
        re.fullmatch(
            r"the gradient norm is \d\.\d+, \d+\.\d robust standard deviations above \d\.\d+, the median of the last "
            "10 good steps",
            str(note["fault"]),
        )
        for note in found
    )
    assert [found[0]["samples"], found[1]["samples"]] == [list(range(120, 128)), list(range(128, 136))]

    # The window is part of the state.
    resumed = stopped_after(config, 18, "resumed").model_copy(update={"plan": build_plan((1, 1, 1, 1))})
    assert ids(train_on_ranks(resumed)[0]) == {step: ids(seen)[step] for step in (18, 19)}
    ends = [read_manifest(list_checkpoints(out(one) / CHECKPOINTS_NAME)[0]).history for one in (config, resumed)]
    assert all(end is not None and end.left_out == (15, 16) and len(end.losses) == 10 for end in ends)
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[1].losses == pytest.approx(ends[0].losses, rel=1e-12)
    assert ends[0].losses[-2:] == tuple(losses(config)[-2:])
    assert ends[1].losses[:8] == ends[0].losses[:8]
    assert ends[1].norms[:8] == ends[0].norms[:8]


def test_spike_is_detected_from_the_good_steps_of_a_full_window() -> None:
    history = StepHistory(BadStepsConfig(spike_z_score=5, window=10))
    for step in range(9):
        assert history.fault(1e9, 1e9) is None
        history.add(3.0 + 0.01 * (step % 3), 1.0, is_bad=False, is_skipped=False)
    # An overflow of float16 is neither good nor bad.
    history.add(3.0, math.inf, is_bad=False, is_skipped=True)
    assert (history.num_skipped, history.num_bad, len(history.norms)) == (1, 0, 9)
    history.add(3.0, 1.0, is_bad=False, is_skipped=False)
    assert history.fault(3.05, 1.0) is None
    assert history.fault(0.5, 0.1) is None
    assert history.fault(3.2, 1.0) == (
        "the loss is 3.2, 12.8 robust standard deviations above 3.01, the median of the last 10 good steps"
    )
    assert history.fault(3.0, 1.004) is None
    assert history.fault(3.0, 1.1) == (
        "the gradient norm is 1.1, 100.0 robust standard deviations above 1, the median of the last 10 good steps"
    )
    history.add(9.0, 9.0, is_bad=True, is_skipped=True)
    other = StepHistory(history.config)
    other.restore(history.saved(), history.num_skipped)
    assert other == history
    assert (other.num_skipped, other.num_bad, other.bad_in_a_row, max(other.losses)) == (2, 1, 1, 3.02)
    unwatched = StepHistory()
    unwatched.restore(history.saved(), history.num_skipped)
    assert unwatched.fault(1e9, 1e9) is None
    assert unwatched.saved() == SavedHistory(bad_steps=1, bad_in_a_row=1)


def test_outliers_do_not_change_the_robust_z_score() -> None:
    ordinary = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert robust_z_score(3.0 + 1.4826, ordinary) == pytest.approx(1.0)
    assert robust_z_score(3.0 + 1.4826, [*ordinary[:4], 1e9]) == pytest.approx(1.0)
    assert robust_z_score(0.0, [0.0] * 5) == 0.0
    assert robust_z_score(1.0, [0.0] * 5) > 1e300


# State that is kept


def break_a_parameter(config: RunConfig) -> str:
    """Damage a parameter of the last rank after the last step before a save; return the message."""
    from meshtrain.training import loop

    step_of_product = loop.train_step

    def breaking(context: Any, step: int, batch: Any, sample_ids: np.ndarray) -> Any:
        result = step_of_product(context, step, batch, sample_ids)
        if step == 3 and dist.get_rank() == 1:
            parameter = next(p for _, p in context.pipeline.named_parameters() if p.dim() == 2)
            local_tensor(parameter.detach()).view(-1)[0] = torch.inf
        return result

    loop.train_step = breaking
    with pytest.raises(TrainingStopped) as caught:
        train_here(config)
    return str(caught.value)


def test_state_that_is_not_finite_is_never_saved(undisturbed: tuple[RunConfig, dict[int, list[int]]]) -> None:
    config = beside(undisturbed[0], "broken", bad_steps=SKIP)
    first, second = run_on_ranks(2, break_a_parameter, config, joins=False)
    assert first == second
    assert first == (
        "step 4: these values are not finite: model.transformer.h.2.attn.c_attn.q.weight; training stopped before a "
        "checkpoint was written; resume from the last one with a lower optimizer.learning_rate, or a lower "
        "optimizer.max_gradient_norm"
    )
    assert [path.name for path in list_checkpoints(out(config) / CHECKPOINTS_NAME)] == ["step-2"]


def test_manifest_without_a_step_history_is_read(tmp_path: Path) -> None:
    names = ("plan_hash", "model_type", "architecture", "data_identity")
    old = Manifest(step=3, seed=0, global_batch_size=8, mesh={}, **dict.fromkeys(names, ""))
    fields = {name: value for name, value in old.model_dump(mode="json").items() if name not in ("history", "checksum")}
    text = json.dumps(fields, separators=(",", ":"))
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**fields, "checksum": checksum}))
    assert read_manifest(tmp_path).history is None
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**fields, "step": 4, "checksum": checksum}))
    with pytest.raises(UserError, match="its checksum does not match its content"):
        read_manifest(tmp_path)


def test_rewind_policy_needs_checkpoints(tmp_path: Path) -> None:
    fields = build_run(tmp_path / "out", "gpt2", build_plan((1, 1, 1, 1)), bad_steps=REWIND).model_dump()
    RunConfig(**fields)
    with pytest.raises(
        ValidationError, match=r'"rewind" goes back to a checkpoint, and without `checkpoint.every` none'
    ):
        RunConfig(**{**fields, "checkpoint": {}})
