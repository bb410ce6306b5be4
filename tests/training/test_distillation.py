"""Distillation: every mesh trains as two stock models in one process by hand; what is refused."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, LlamaConfig

import meshtrain
from meshtrain.config.data import TokenizerConfig
from meshtrain.config.distillation import NO_DISTILLATION
from meshtrain.config.lora import LoraConfig
from meshtrain.config.run import EvaluationConfig, ModelConfig, RunConfig
from meshtrain.config.toml import load_run
from meshtrain.errors import ConfigError, UserError
from meshtrain.planning.search.command import search
from meshtrain.training.distillation.divergence import summed_divergence
from meshtrain.training.distillation.loss import laid_out
from meshtrain.training.report import plan_table
from meshtrain.training.resolve import ResolvedRun, resolve_run
from tests.ranks import run_on_ranks
from tests.training.preferences import close, compare, refused, train, write_base
from tests.training.runs import VOCABULARY, Mesh, build_plan, build_run, read_metrics, steps_of, train_here, write_text
from tests.training.teachers import TEMPERATURE, run_on, stock_of, write_models, write_teacher

# pp, dp_replicate, dp_shard, tp
MESHES: list[Mesh] = [(1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2)]


def test_every_mesh_trains_as_two_stock_models_in_one_process(tmp_path: Path) -> None:
    write_models(tmp_path)
    stock = stock_of(tmp_path)
    assert stock.terms[0]["kl"] > 0.1
    assert stock.losses[2] != close(stock.losses[0])
    for mesh in MESHES:
        train(run_on(tmp_path, mesh))
        compare(tmp_path / "-".join(map(str, mesh)), stock)
    train(run_on(tmp_path, (1, 1, 2, 2), sequence_parallel=True))
    compare(tmp_path / "1-1-2-2", stock)


def test_padded_rows_and_a_resumption_on_other_meshes(tmp_path: Path) -> None:
    """Each start reads the teacher from its folder again."""
    write_models(tmp_path)
    write_text(tmp_path / "text.jsonl", documents=40)
    stock = stock_of(tmp_path, form="padded")
    for steps, mesh in ((1, (1, 1, 2, 1)), (2, (1, 1, 1, 2)), (3, (1, 2, 1, 1))):
        train(run_on(tmp_path, mesh, name="resumed", steps=steps, form="padded"))
    compare(tmp_path / "resumed", stock)


def test_documents_are_separate_for_the_teacher_too(tmp_path: Path) -> None:
    write_models(tmp_path)
    write_text(tmp_path / "text.jsonl", documents=60)
    data = run_on(tmp_path, (1, 1, 1, 1)).data
    apart = data.model_copy(update={"documents": "separate", "sequence_length": 32})
    stock = stock_of(tmp_path, data=apart)
    train(run_on(tmp_path, (1, 1, 2, 1), data=apart))
    compare(tmp_path / "1-1-2-1", stock)
    train(run_on(tmp_path, (1, 1, 1, 1), name="joined", data=apart.model_copy(update={"documents": "joined"})))
    assert steps_of(tmp_path / "joined")[0]["kl"] != close(stock.terms[0]["kl"])


def test_adapters_and_evaluations_beside_a_teacher(tmp_path: Path) -> None:
    """Evaluations are those of the cross-entropy. Adapters learn as in one process."""
    write_models(tmp_path)
    write_text(tmp_path / "held-out.jsonl", documents=12, seed=2)
    found = []
    for mesh in ((1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1)):
        run = run_on(tmp_path, mesh, lora=LoraConfig(rank=2), evaluation=EvaluationConfig(every=3))
        data = run.data.model_copy(update={"validation": [str(tmp_path / "held-out.jsonl")]})
        train(run.model_copy(update={"data": data}))
        *steps, evaluation = (it for it in read_metrics(Path(run.run_directory)) if "loss" in it or "eval_loss" in it)
        assert "eval_kl" not in evaluation
        found.append([[it["loss"], it["kl"]] for it in steps] + [[evaluation["eval_loss"]]])
    for others in found[1:]:
        assert others == [[close(value) for value in values] for values in found[0]]


def test_teacher_of_other_weights_is_refused_at_a_resumption(tmp_path: Path) -> None:
    write_models(tmp_path)
    train(run_on(tmp_path, (1, 1, 1, 1), name="run", steps=1))
    write_teacher(tmp_path, seed=2)
    found = refused(run_on(tmp_path, (1, 1, 2, 1), name="run", steps=2))
    assert "its teacher had other weights than those in" in found
    assert found.endswith("put back the model that was there then")


def test_run_that_began_without_a_teacher_gets_none(tmp_path: Path) -> None:
    write_models(tmp_path)
    run = run_on(tmp_path, (1, 1, 1, 1), name="run", steps=1)
    train(run.model_copy(update={"distillation": NO_DISTILLATION}))
    # Changed by hand, as the error of the first attempt advises.
    (tmp_path / "run/run.toml").unlink()
    found = refused(run_on(tmp_path, (1, 1, 1, 1), name="run", steps=2))
    assert "it was saved by a run without a teacher, and distillation.teacher = " in found
    assert found.endswith("or begin a new run from its weights in a directory of its own")


def shown_by(run: RunConfig) -> str:
    """Train in this process, and return what the run prints."""
    with redirect_stdout(StringIO()) as shown:
        train_here(run)
    return " ".join(shown.getvalue().split())


def test_run_that_goes_on_without_its_teacher_says_so(tmp_path: Path) -> None:
    write_models(tmp_path)
    run = run_on(tmp_path, (1, 1, 1, 1), name="run", steps=1)
    train(run)
    (tmp_path / "run/run.toml").unlink()
    without = run.model_copy(update={"distillation": NO_DISTILLATION, "steps": 2})
    (shown,) = run_on_ranks(1, shown_by, without, joins=False)
    teacher = tmp_path / "teacher"
    assert f"step-1 was saved by a run with the teacher {teacher}, and this run goes on without one" in shown


def divergences(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return divergence and gradient for sharded logits, and those of full ones by torch."""
    draw = torch.Generator().manual_seed(seed)
    logits, theirs = (torch.randn(6, 7, generator=draw, dtype=torch.float64) * 9 for _ in range(2))
    theirs[2, 3] = logits[2, 3] = logits[4, 5] = theirs[4, 5] = -torch.inf
    counted = torch.tensor([True, True, True, False, True, True])
    full = logits.clone().requires_grad_()
    ours, wanted = (F.log_softmax(it / TEMPERATURE, -1)[counted] for it in (full, theirs))
    expected = torch.where(wanted.isinf(), 0.0, wanted.exp() * (wanted - ours)).sum()
    expected.backward()
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    own = logits[:, mine].clone().requires_grad_()
    found = summed_divergence(own, theirs[:, mine], counted, TEMPERATURE, dist.group.WORLD)
    found.backward()
    assert own.grad is not None
    assert full.grad is not None
    return [found.detach(), own.grad], [expected.detach(), full.grad[:, mine].nan_to_num()]


def test_divergence_of_uneven_shards_is_that_of_full_logits() -> None:
    for found, wanted in run_on_ranks(2, divergences, 0):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def layouts() -> tuple[Tensor, Tensor, Tensor]:
    """Return full logits, and both changes of layout of them on this rank."""
    group = dist.group.WORLD
    full = torch.arange(14.0).view(1, 2, 7)
    part = laid_out(full, 7, None, group)
    return full, part, laid_out(part, 7, group, None)


def test_logits_of_a_teacher_are_laid_out_as_those_of_the_model() -> None:
    for rank, (full, part, again) in enumerate(run_on_ranks(2, layouts)):
        assert torch.equal(part, full[..., 4 * rank : 4 * rank + 4])
        assert torch.equal(again, full)


RUN = """
run_directory = "out"
steps = 1
global_batch_size = 4
model = { path = "base", weights = "pretrained" }
distillation.teacher = "teacher"

[data]
train = ["text.jsonl"]
tokenizer = { path = "base" }
sequence_length = 16
"""
REFUSED: list[tuple[list[str], int, str]] = [
    (
        ["plan.mesh.pp = 2", "plan.pipeline = { schedule = 'Interleaved1F1B', stages_per_rank = 2 }"],
        2,
        "distillation.teacher: mesh.pp x stages_per_rank makes 4 stages, but the model has only 2 layers; use fewer",
    ),
    (["plan.mesh.tp = 4"], 4, "distillation.teacher: mesh.tp = 4 does not divide the model's 2 attention heads"),
    (["plan.loss.chunk_tokens = 64"], 1, "loss.chunk_tokens = 64 computes the loss in chunks of tokens, and that of "),
    (
        ['preference.loss = "dpo"', 'data.format = "preference"', 'data.form = "padded"'],
        1,
        "`preference.loss` is a loss of whole answers, and `distillation.teacher` has a loss of its own; leave out one",
    ),
    (["objective.z_loss = 0.1"], 1, "`objective` changes the loss, and `distillation.teacher` has a loss of its own"),
    (['data.weight_key = "w"'], 1, "`weight_key` weights the tokens of the cross-entropy, and `distillation.teacher`"),
    (["logging.noise_scale_every = 5"], 1, "`logging.noise_scale_every` measures gradients of the cross-entropy, and"),
    (
        ["data.sequence_length = 33", "model.config.max_position_embeddings = 64"],
        1,
        "distillation.teacher: data.sequence_length",
    ),
]
FOLDERS = [
    ("none", "none': there is no such directory; set it to the local directory of a Hugging Face model"),
    ("fewer", "distillation.teacher: its vocabulary has 280 tokens, and that of the model 300, so their logits cannot"),
    (".", ": the directory holds no config.json; set it to the local directory of a Hugging Face model"),
    ("run/checkpoints/step-1", "step-1' is a checkpoint; export it, and set it to the exported directory"),
]


def test_refusals_of_a_folder_name_the_teacher(tmp_path: Path) -> None:
    write_base(tmp_path)
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher/config.json").write_text('{"model_type": "unheard_of"}')
    found = refusal(tmp_path, [], 1)
    assert found.startswith("distillation.teacher: '")
    assert "teacher': it holds no Hugging Face model: The checkpoint you are trying to load has model type" in found
    assert "model.path" not in found


def refusal(directory: Path, changes: list[str], processes: int, teacher: str = "teacher") -> str:
    """Return the only line with which a run is refused before it starts."""
    (directory / "run.toml").write_text(RUN.replace('"teacher"', f'"{teacher}"'))
    with pytest.raises(UserError) as caught:
        resolve_run(load_run(directory / "run.toml", changes), processes)
    (line,) = caught.value.lines
    return line


@pytest.mark.parametrize(("changes", "processes", "message"), REFUSED, ids=[changes[0] for changes, _, _ in REFUSED])
def test_what_a_teacher_excludes_is_refused(tmp_path: Path, changes: list[str], processes: int, message: str) -> None:
    write_base(tmp_path)
    write_teacher(tmp_path, n_head=2, n_layer=2)
    found = refusal(tmp_path, changes, processes)
    assert message in found, found


@pytest.mark.parametrize(("folder", "message"), FOLDERS, ids=[folder for folder, _ in FOLDERS])
def test_folders_without_a_teacher_are_refused(tmp_path: Path, folder: str, message: str) -> None:
    write_base(tmp_path)
    write_teacher(tmp_path, vocab_size=280)
    (tmp_path / "teacher").rename(tmp_path / "fewer")
    if folder.startswith("run"):
        train(build_run(tmp_path / "run", "qwen3", build_plan((1, 1, 1, 1)), steps=1))
    found = refusal(tmp_path, [], 1, folder)
    assert message in found, found


OF_EXPERTS = """model = { type = "mixtral", config = { vocab_size = 300, hidden_size = 32, intermediate_size = 48, \
num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 4, num_local_experts = 4 } }"""


def test_experts_on_several_processes_are_refused_beside_a_dense_teacher(tmp_path: Path) -> None:
    write_teacher(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.replace('model = { path = "base", weights = "pretrained" }', OF_EXPERTS))
    with pytest.raises(UserError) as caught:
        resolve_run(load_run(tmp_path / "run.toml", ["plan.mesh.ep = 2"]), 2)
    assert caught.value.lines == (
        "distillation.teacher: mesh.ep = 2: GPT2LMHeadModel has no stacked experts; use ep = 1",
    )


def test_teacher_whose_frequencies_depend_on_the_batch_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, rope_parameters=rope, max_position_embeddings=8, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "teacher")
    assert refusal(tmp_path, [], 1) == (
        "distillation.teacher: sequences of more than 8 tokens change the rotary frequencies of this LlamaForCausalLM "
        "for all others in their batch; set data.sequence_length = 8 or less, or take another teacher"
    )
    (tmp_path / "run.toml").write_text(RUN)
    fits = resolve_run(load_run(tmp_path / "run.toml", ["data.sequence_length = 8"]), 1)
    assert fits.teacher is not None


def resolved_with(directory: Path, changes: list[str], processes: int) -> ResolvedRun:
    (directory / "run.toml").write_text(RUN)
    return resolve_run(load_run(directory / "run.toml", changes), processes)


@pytest.mark.parametrize("cut", ["layers_per_stage = [3, 1]", 'split_at = ["model.layers.3"]'])
def test_layers_of_a_teacher_are_balanced_where_the_plan_names_those_of_the_model(tmp_path: Path, cut: str) -> None:
    write_base(tmp_path)
    write_teacher(tmp_path, n_layer=6)
    resolved = resolved_with(tmp_path, ["plan.mesh.pp = 2", f"plan.pipeline.{cut}"], 2)
    assert resolved.teacher is not None
    assert resolved.plan.pipeline.layer_counts == [3, 1]
    counts = resolved.teacher.plan.pipeline.layer_counts
    assert sum(counts) == 6
    assert resolved.teacher.base == "transformer"
    row = dict(plan_table(resolved).rows)["teacher"]
    assert row.endswith(
        f"MB on a process at most, beside those of the model, layers per stage {counts}; the last hidden states of a "
        "batch are kept for the loss"
    )


def test_a_teacher_in_one_piece_keeps_nothing(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_teacher(tmp_path)
    resolved = resolved_with(tmp_path, [], 1)
    assert resolved.teacher is not None
    assert resolved.teacher.base is None
    size = resolved.teacher.build_model().num_parameters() * 4 / 1e6
    row = dict(plan_table(resolved).rows)["teacher"]
    assert row.endswith(f"frozen in float32, {size:,.2f} MB on a process at most, beside those of the model")
    sharded = dict(plan_table(resolved_with(tmp_path, ["plan.mesh.dp_shard = 2"], 2)).rows)["teacher"]
    assert f", {size / 2:,.2f} MB on a process at most" in sharded


def test_all_logits_are_compared_where_a_loss_of_tokens_takes_chunks(tmp_path: Path) -> None:
    """The logits of a microbatch take a GiB."""
    shape = {"vocab_size": 2**17, "n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": 32}
    config = GPT2Config(**shape)
    config.save_pretrained(tmp_path / "teacher")
    run = run_on(tmp_path, (1, 1, 1, 1), micro_batch_size=32, global_batch_size=32)
    data = run.data.model_copy(update={"tokenizer": TokenizerConfig(vocab_size=300), "sequence_length": 32})
    run = run.model_copy(update={"data": data, "model": ModelConfig(type="gpt2", config=shape)})
    resolved, alone = (resolve_run(run.model_copy(update=it), 1) for it in ({}, {"distillation": NO_DISTILLATION}))
    assert resolved.teacher is not None
    assert resolved.plan.loss.chunk_tokens == resolved.teacher.plan.loss.chunk_tokens == 0
    assert alone.plan.loss.chunk_tokens


def test_settings_without_a_teacher_and_what_cannot_see_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace('teacher = "teacher"', "weight = 0.3"))
    with pytest.raises(ConfigError, match=r"`weight` is not read without `teacher`; set `teacher`, or leave it out"):
        load_run(tmp_path / "run.toml")
    run = run_on(tmp_path, (1, 1, 1, 1))
    with pytest.raises(ConfigError, match=r"train: loss replaces the loss of the run, but its table \[distillation\]"):
        meshtrain.train(run, loss=lambda logits, labels: logits.sum())
    with pytest.raises(ConfigError, match=r"the search does not know the memory and the time of a teacher"):
        search(run, [], 1, "h100-80gb", 1, tmp_path / "plan.toml")
