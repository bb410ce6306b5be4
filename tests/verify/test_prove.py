"""`meshtrain verify` proves correct plans, and detects and locates every kind of damage."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from meshtrain import cli
from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PipelinePlan, ShardPlan
from meshtrain.config.run import ModelConfig
from meshtrain.config.toml import load_run
from meshtrain.errors import ModelError
from meshtrain.models.build import load_hf_config
from meshtrain.models.tiny import default_config
from meshtrain.parallel import tied
from meshtrain.training import gradients
from meshtrain.training.loss import MeanLoss, TokenLoss
from meshtrain.training.resolve import resolve_run
from meshtrain.verify import classes, parallel, prove
from meshtrain.verify.case import ProofCase, Trace
from meshtrain.verify.compare import are_watched, compare, first_divergent_layer, tensor_error
from meshtrain.verify.parallel import initial_weights, train_plan
from meshtrain.verify.reference import train_stock
from meshtrain.verify.verify_run import make_case, make_cases
from tests.parity import DYNAMIC, LLAMA, LONGROPE
from tests.ranks import run_on_ranks
from tests.training.runs import LLAMA_TEXT, RUN_TEXT, write_text

RUN = """
run_directory = "out"
steps = 1
global_batch_size = 8
model = { type = "qwen3" }
plan.mesh = { pp = 2, tp = 2, dp_shard = 1 }
"""
UNKNOWN = RUN_TEXT + LLAMA_TEXT.replace("llama", "olmo2")


def case_of(model_type: str, mesh: dict[str, int], **tables: Any) -> ProofCase:
    plan = with_family(ParallelPlan(**tables), model_type)
    return make_case(load_hf_config(ModelConfig(type=model_type)), plan, MeshPlan(**{"dp_shard": 1, **mesh}))


def one_device(case: ProofCase) -> tuple[dict[str, Tensor], Trace]:
    initial = initial_weights(case)
    return initial, train_stock(case, initial)


def train_damaged(damage: Callable[[], None], case: ProofCase, initial: dict[str, Tensor]) -> Trace:
    damage()
    return train_plan(case, initial)


def no_damage() -> None:
    """Leave everything as it is."""


def skip_head_norm_reduction() -> None:
    """Remove the rule that sums the gradients of q_norm and k_norm over tp."""
    build = parallel.build_pipeline

    def without_norms(*args: Any, **kwargs: Any) -> Any:
        pipeline = build(*args, **kwargs)
        object.__setattr__(pipeline, "summed_over_tp", frozenset())
        return pipeline

    parallel.build_pipeline = without_norms


def weight_microbatches_equally() -> None:
    """Use the mean of the microbatches' means."""

    def mean(self: MeanLoss, logits: Tensor, labels: Tensor) -> Tensor:
        return self.total(logits, labels) / (labels != -100).sum().clamp(min=1) / 4

    MeanLoss.__call__ = mean  # type: ignore[method-assign]


def skip_a_layer() -> None:
    """Let the first layer of the second stage return its input."""
    build = parallel.build_pipeline

    def without_layer(*args: Any, **kwargs: Any) -> Any:
        pipeline = build(*args, **kwargs)
        for stage in pipeline.stages:
            if not stage.is_first:
                stage.own_layers()[0].forward = lambda hidden, *args, **kwargs: hidden * 1.0
        return pipeline

    parallel.build_pipeline = without_layer


def ignore_the_length() -> None:
    """Compute with the frequencies of short sequences only."""
    train = parallel.train_pipeline

    def with_fixed_frequencies(pipeline: Any, batches: Any, **options: Any) -> Trace:
        for stage in pipeline.stages:
            stage.model.model.rotary_emb.rope_type = "default"
        return train(pipeline, batches, **options)

    parallel.train_pipeline = with_fixed_frequencies


def skip_tied_reduction() -> None:
    """Do not add the gradients of the two ends of a tie."""
    tied.TiedCopies.reduce_gradients = lambda self: None  # type: ignore[method-assign]


def skip_strided_shards() -> None:
    """Use `is_shard()` to select the gradients whose norms are summed."""

    def axes(gradient: Tensor) -> frozenset[str]:
        if not isinstance(gradient, DTensor):
            return frozenset()
        names = gradient.device_mesh.mesh_dim_names or ()
        return frozenset(
            name for name, placement in zip(names, gradient.placements, strict=True) if placement.is_shard()
        )

    gradients._sharded_axes = axes


def findings_of(damage: Callable[[], None], case: ProofCase) -> tuple[dict[str, Any], str | None]:
    ((initial, expected),) = run_on_ranks(1, one_device, case)
    mesh = case.plan.mesh
    world_size = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp
    traces = run_on_ranks(world_size, train_damaged, damage, case, initial)
    return {finding.what: finding for finding in compare(traces, expected)}, first_divergent_layer(traces, expected)


@functools.cache
def qwen3() -> ProofCase:
    return case_of("qwen3", {"tp": 2})


def test_correct_plans_are_proven() -> None:
    found, divergent = findings_of(no_damage, case_of("qwen3", {"pp": 2, "tp": 2}))
    assert all(finding.holds for finding in found.values()), found
    assert found["initial weights"].error == 0.0
    assert divergent is None


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_length_dependent_frequencies_are_proven(rope: dict[str, Any]) -> None:
    plan = with_family(ParallelPlan(), "llama")
    config = AutoConfig.for_model("llama", **{**LLAMA, "rope_parameters": rope})
    found, divergent = findings_of(no_damage, make_case(config, plan, MeshPlan(pp=2, dp_shard=1), rows="bucketed"))
    assert all(finding.holds for finding in found.values()), found
    assert divergent is None
    found, divergent = findings_of(ignore_the_length, make_case(config, plan, MeshPlan(pp=2, dp_shard=1)))
    assert not found["loss"].holds
    assert divergent == "model.layers.0"


def test_model_that_writes_into_a_projection_is_proven() -> None:
    """Falcon adds the output of its attention to that of its MLP, in the memory of the latter."""
    proof = prove.prove(case_of("falcon", {"tp": 2}))
    assert proof.difference is None


def test_missing_rule_for_head_norms_is_detected() -> None:
    found, divergent = findings_of(skip_head_norm_reduction, qwen3())
    assert found["gradient"].error > 1e-2
    assert found["gradient"].where.endswith(("q_norm.weight", "k_norm.weight"))
    # The forward pass and the loss of the first step are correct.
    assert divergent is None


def test_equally_weighted_microbatches_are_detected() -> None:
    found, divergent = findings_of(weight_microbatches_equally, case_of("gpt2", {"pp": 2}))
    assert found["loss"].error > 1e-3
    assert divergent is None


def test_skipped_layer_of_a_stage_is_detected() -> None:
    case = case_of("gpt2", {"pp": 2}, pipeline=PipelinePlan(layers_per_stage=[2, 2]))
    found, divergent = findings_of(skip_a_layer, case)
    assert not found["loss"].holds
    assert found["gradient"].error > 1e-2
    # The proof keeps one of two layers on each of the two stages.
    assert divergent == "transformer.h.1"


def test_tied_copy_that_is_not_reduced_is_detected() -> None:
    found, _ = findings_of(skip_tied_reduction, case_of("gpt2", {"pp": 2}))
    assert found["gradient"].where == "transformer.wte.weight"
    assert found["gradient"].error > 1e-2


def test_gradient_norm_without_strided_shards_is_detected() -> None:
    found, _ = findings_of(skip_strided_shards, case_of("llama", {"dp_shard": 2, "tp": 2}))
    assert found["gradient norm"].error > 1e-3


def test_zero_bubble_schedule_with_resharding_is_detected() -> None:
    case = case_of(
        "llama", {"pp": 2, "dp_shard": 2}, pipeline=PipelinePlan(schedule="ZBVZeroBubble", stages_per_rank=2)
    )
    assert case.plan.shard.reshard_after_forward == "never"
    resharding = case.plan.model_copy(update={"shard": ShardPlan(reshard_after_forward="always")})
    found, _ = findings_of(no_damage, ProofCase(**{**vars(case), "plan": resharding}))
    assert not found["gradient"].holds


def test_command_proves_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    assert cli._exit_code(["verify", str(tmp_path / "run.toml"), "--json", str(tmp_path / "proof.json")]) == 0
    shown = capsys.readouterr().out
    assert "Qwen3ForCausalLM: pp 2 x tp 2 computes what one device computes" in shown
    (proof,) = json.loads((tmp_path / "proof.json").read_text())
    assert proof["proven"]
    assert proof["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "ep": 1, "cp": 1, "tp": 2}
    assert [finding["what"] for finding in proof["findings"]] == [
        "initial weights",
        "loss",
        "gradient norm",
        "gradient",
        "parameter after 3 steps",
        "evaluation loss",
    ]


def test_class_that_cannot_be_cut_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    reformer = ['model.type="reformer"', 'model.attention="eager"', "plan.mesh.tp=1", "model.config.is_decoder=true"]
    assert cli._exit_code(["verify", str(tmp_path / "run.toml"), *reformer]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ReformerModelWithLMHead cannot be cut into stages")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["plan.mesh.tp=3"], "mesh.tp = 3 "),
        (["plan.mesh.tp=64"], "mesh.tp = 64 "),
        (["plan.pipeline.layers_per_stage=[3, 4]"], "pipeline.layers_per_stage"),
        (["plan.pipeline.split_at=['nonsense']"], "pipeline.split_at"),
        (["micro_batch_size=3"], "global_batch_size"),
        (["data.sequence_length=4096"], "data.sequence_length"),
    ],
    ids=str,
)
def test_plan_that_cannot_run_is_refused(
    overrides: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tiny copy, which has other sizes, must not hide the problem.
    (tmp_path / "run.toml").write_text(UNKNOWN.replace("olmo2", "llama"))
    run = [str(tmp_path / "run.toml"), "plan.mesh={pp=2, tp=2, dp_shard=1}", *overrides]
    assert cli._exit_code(["verify", *run]) == 2
    message = capsys.readouterr().err
    assert problem in message
    mesh = load_run(tmp_path / "run.toml", run[1:]).plan.mesh
    world_size = str(mesh.pp * mesh.tp)
    assert cli._exit_code(["check", *run, "--world-size", world_size]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "meshtrain verify takes a RUN, or --models for every class of transformers; pass one of them"),
        (
            ["run.toml", "--models"],
            "meshtrain verify takes a RUN, or --models for every class of transformers; pass one",
        ),
        (["run.toml", "--type", "gpt2"], "--json belongs to a RUN, --type, --defaults and --table to"),
        (["run.toml", "--table", "coverage.md"], "--json belongs to a RUN, --type, --defaults and --table to"),
        (["--models", "--table", "no/coverage.md"], "--table: no is not a directory; create it, or choose another one"),
        (["--models", "--json", "proof.json"], "--json belongs to a RUN, --type, --defaults and --table to"),
        (["--models", "--type", "gtp2"], "--type: transformers has no causal language model of the type 'gtp2'"),
        (["run.toml", "--json", "no/proof.json"], "--json: no is not a directory; create it, or choose another one"),
        (["run.toml", "--json", ""], "--json: . is a directory; pass the name of a file"),
        (["run.toml", "--json", "/"], "--json: / is a directory; pass the name of a file"),
        (["--models", "--table", "/"], "--table: / is a directory; pass the name of a file"),
        (["run.toml", "--json", "n" * 300], f"--json: {'n' * 300} cannot be written (File name too long); choose"),
        (["run.toml", "--json", "/proc/proof.json"], "--json: /proc/proof.json cannot be written ("),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_line_errors(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    assert cli._exit_code(["verify", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {problem}")


def test_user_error_leaves_no_empty_file(tmp_path: Path) -> None:
    assert cli._exit_code(["verify", str(tmp_path / "no.toml"), "--json", str(tmp_path / "proof.json")]) == 2
    assert not list(tmp_path.iterdir())


def make_loss_not_finite() -> None:
    """Let the loss of the plan, and only of the plan, be NaN."""
    call = TokenLoss.__call__
    TokenLoss.__call__ = lambda self, logits, labels: call(self, logits, labels) * torch.nan  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("damage", "difference"),
    [
        (weight_microbatches_equally, r"gradient by \S+ at model\.\S+"),
        (make_loss_not_finite, r"step 1: the loss is nan, .*"),
    ],
)
def test_plan_that_differs_is_not_proven(
    damage: Callable[[], None],
    difference: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from meshtrain.verify.first_use import ensure_proven

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "train_plan", functools.partial(train_damaged, damage))
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "run.toml").write_text(UNKNOWN)
    assert cli._exit_code(["verify", "run.toml"]) == 1
    assert "Olmo2ForCausalLM: dp_shard 2 does NOT compute what one device computes" in capsys.readouterr().out
    refusal = (
        r"^Olmo2ForCausalLM under this plan does not compute what one device computes: it differs in "
        rf"{difference}; see `meshtrain verify`, or set model\.prove_unknown_class = false to train without a proof$"
    )
    with pytest.raises(ModelError, match=refusal):
        ensure_proven(resolve_run(load_run("run.toml")))
    assert not list((tmp_path / "cache").glob("proofs/*/proof.json"))


def test_one_differing_layer_fails_a_proof() -> None:
    close, far = (prove.Finding("loss", "step 2", error, 1e-12) for error in (1e-13, 1e-3))
    assert prove.Proof("A", MeshPlan(), (close,), None).holds
    assert prove.Proof("A", MeshPlan(), (close,), "model.layers.1").difference == "the output of model.layers.1"
    assert prove.Proof("A", MeshPlan(), (close, far), "model.layers.1").difference == "loss by 1e-03 at step 2"


def test_small_forbidden_difference_is_found_beside_larger_allowed_ones() -> None:
    initial, loss = prove.Finding("initial weights", "a.weight", 1e-16, 0.0), prove.Finding("loss", "", 1e-13, 1e-12)
    proof = prove.Proof("A", MeshPlan(), (initial, loss), None)
    assert proof.difference == "initial weights by 1e-16 at a.weight"
    assert not proof.holds


def test_unwatched_layers_are_reported_as_not_watched(capsys: pytest.CaptureFixture[str]) -> None:
    output, none = {"layers.0": torch.ones(2, 3, 4)}, {"layers.0": torch.ones(0, 4)}
    assert are_watched([Trace(), Trace(layers=output)], Trace(layers=output))
    # The layers are compiled; or their stream has rows that are not samples.
    assert not are_watched([Trace()], Trace(layers=output))
    assert not are_watched([Trace(layers=none)], Trace(layers=none))
    finding = prove.Finding("loss", "", 0.0, 1e-12)
    for watched, shown in ((True, ["none", "yes"]), (False, ["not", "watched"])):
        prove.show_proof(prove.Proof("A", MeshPlan(), (finding,), None, watched))
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "divergent" in line)
        assert line.split()[3:] == shown


def test_relative_error_to_zeros_is_infinite() -> None:
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    assert tensor_error(ones, zeros) == math.inf
    assert tensor_error(ones, zeros, scale=2.0) == 0.5
    assert tensor_error(zeros, zeros) == 0.0


def test_class_that_differs_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "train_plan", functools.partial(train_damaged, weight_microbatches_equally))
    table = tmp_path / "coverage.md"
    assert cli._exit_code(["verify", "--models", "--defaults", "--type", "gpt2", "--table", str(table)]) == 1
    assert "| gpt2 | GPT2LMHeadModel | differs in gradient by " in table.read_text()
    assert "tensor: proven are 0 of 1 model types (0 of 1 distinct classes)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("random", "given", "cell", "code"),
    [
        ("proven", "proven", "proven", 0),
        ("refused: why", "proven", "proven from pretrained weights; refused: why", 0),
        ("refused: why", "refused: why", "refused: why", 0),
        ("refused: why", "differs in loss", "differs in loss, from pretrained weights; refused: why", 1),
        ("differs in loss", "proven", "differs in loss", 1),
        ("fails: why", "proven", "fails: why", 1),
    ],
)
def test_refused_classes_alone_are_tried_from_pretrained_weights(
    random: str, given: str, cell: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes, "_try", lambda config, mesh, tensor, *, pretrained: given if pretrained else random)
    monkeypatch.setattr(classes, "_drop", lambda config: "proven")
    table = tmp_path / "coverage.md"
    assert cli._exit_code(["verify", "--models", "--defaults", "--type", "gpt2", "--table", str(table)]) == code
    cells = " | ".join([*[cell] * 4, "has no stacked experts", "proven"])
    assert table.read_text().splitlines()[-1] == f"| gpt2 | GPT2LMHeadModel | {cells} | - |"


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bamba", {"attn_layer_indices": None}, "a tiny copy of a bamba drops nothing, whatever its rates are"),
        (
            "diffllama",
            {},
            "transformers cannot build a diffllama model from this configuration: DiffLlama does not",
        ),
    ],
)
def test_classes_that_drop_nothing_are_not_proven(model_type: str, changes: dict[str, Any], reason: str) -> None:
    assert classes._drop(default_config(model_type, changes)).startswith(f"refused: {reason}")


def test_model_types_and_classes_are_counted() -> None:
    results = [("a", "A", "proven"), ("b", "B", "proven"), ("c", "B", "proven from pretrained weights; refused: why")]
    verdicts = [classes.Verdict(kind, name, {"tensor": result}) for kind, name, result in results]
    words = "proven are 3 of 3 model types (2 of 2 distinct classes), 1 of them from pretrained weights only"
    assert classes._count(verdicts, "tensor") == words
    # A class is not proven unless all its types are.
    verdicts.append(classes.Verdict("d", "B", {"tensor": "refused: why"}))
    words = "proven are 3 of 4 model types (1 of 2 distinct classes), 1 of them from pretrained weights only"
    assert classes._count(verdicts, "tensor") == words


def fail_to_run() -> None:
    """Let the plan fail."""
    raise RuntimeError("the copy is broken")


def test_unknown_class_is_proven_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshtrain.verify.first_use import ensure_proven

    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "run.toml").write_text(UNKNOWN)
    ensure_proven(resolve_run(load_run("run.toml")))
    assert capsys.readouterr().out.splitlines() == [
        "Olmo2ForCausalLM is new here: proving the plan on a tiny copy of it",
        "Proven: dp_shard 2 computes what one device computes",
    ]
    for again in ((), ("model.prove_unknown_class=false", "model.config.rms_norm_eps=1e-3")):
        ensure_proven(resolve_run(load_run("run.toml", again)))
        assert capsys.readouterr().out == ""
    # Another configuration of the class needs another proof.
    proofs = list((tmp_path / "cache" / "proofs").glob("*/proof.json"))
    assert len(proofs) == 1
    # The tiny copy has four layers; the sixth is in the message of the check of the run itself.
    deeper = ("model.config.num_hidden_layers=6", 'plan.tensor.local_attributes={"model.layers.5.mlp"=["hidden_size"]}')
    with pytest.raises(ModelError) as caught:
        ensure_proven(resolve_run(load_run("run.toml", deeper)))
    assert caught.value.lines == (
        "tensor.local_attributes: 'model.layers.5.mlp' matches no module of the model; the nearest is "
        "'model.layers.*.mlp'",
        "so it cannot be proven on a tiny copy; set model.prove_unknown_class = false to train without a proof",
    )
    monkeypatch.setattr(prove, "train_plan", functools.partial(train_damaged, fail_to_run))
    resolved = resolve_run(load_run("run.toml", ("model.config.num_hidden_layers=3", "model.config.hidden_act=gelu")))
    with pytest.raises(ModelError, match=r"does not run: .*broken\n.*model\.prove_unknown_class = false"):
        ensure_proven(resolved)


def test_table_of_classes_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "coverage.md"
    arguments = [
        "verify",
        "--models",
        "--defaults",
        "--type",
        "gpt2",
        "--type",
        "ctrl",
        "--type",
        "blt",
        "--table",
        str(table),
    ]
    assert cli._exit_code(arguments) == 0
    assert "pipeline x sharding: proven are 2 of 3 model types (2 of 3 distinct classes)" in capsys.readouterr().out
    gpt2, ctrl, blt = table.read_text().splitlines()[-3:]
    reason = "refused: a blt configuration has no number of layers; it holds several models ("
    assert blt.startswith(f"| blt | BltForCausalLM | {reason}")
    assert blt.count(reason) == 4
    assert blt.endswith("| has no attention dropout | - |")
    assert gpt2 == f"| gpt2 | GPT2LMHeadModel |{' proven |' * 4} has no stacked experts | proven | - |"
    split = "proven without sequence parallelism; refused: tensor.sequence_parallel: not for a ctrl: its layers combine"
    assert ctrl.startswith(f"| ctrl | CTRLLMHeadModel | proven | proven | {split}")
    assert ctrl.endswith("| proven | has no stacked experts | has no attention dropout | - |")


def casts_of_a_norm() -> tuple[torch.dtype, ...]:
    """Return the formats of a norm that casts to float32, with and without lifted casts."""
    from transformers.models.llama import modeling_llama

    from tests.casts import lift_float32_casts

    wide, narrow = torch.full((1, 8), 1 / 3, dtype=torch.float64), torch.full((1, 8), 1 / 3)
    norm = modeling_llama.LlamaRMSNorm(8).double()
    before = norm(wide)
    lift_float32_casts()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    assert not torch.equal(before, exact)
    assert torch.equal(norm(wide), exact)
    assert modeling_llama.torch.float32 is torch.float64
    return wide.float().dtype, narrow.float().dtype, narrow.to(torch.bfloat16).float().dtype


def test_float64_is_kept_while_casts_are_lifted() -> None:
    (found,) = run_on_ranks(1, casts_of_a_norm)
    assert found == (torch.float64, torch.float32, torch.float32)


def test_chunks_are_proven_if_the_run_uses_them(tmp_path: Path) -> None:
    """A tiny copy has so few logits that `auto` would compute all of them."""
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    for changes, size, proven in (
        (["data.sequence_length=4096"], 512, 5),
        (["data.sequence_length=512"], 0, 0),
        (["data.sequence_length=512", "plan.loss.chunk_tokens=100"], 100, 5),
        (["data.sequence_length=512", "plan.loss.chunk_tokens=3"], 3, 3),
    ):
        resolved = resolve_run(load_run(file, ["micro_batch_size=1", *changes]))
        assert resolved.plan.loss.size == size
        assert {case.plan.loss.size for case in make_cases(resolved)} == {proven}
