"""The plan file: everything about how a model is parallelised, and nothing else."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshtrain.config.mesh import Degree, MeshPlan
from meshtrain.config.words import LARGEST, Count, NotNegative, Positive, Words

Dtype = Literal["float32", "bfloat16", "float64"]
ComputeDtype = Literal["float32", "bfloat16", "float16", "float64"]
ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
Style = Literal[
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "embedding_rowwise",
    "sequence_parallel",
    "replicate",
    "replicated_with_grad_allreduce",
    "shared_input",
    "rowwise_split_input",
    "replicated_heads",
    "per_head",
    "colwise_blocks",
    "mla_kv_a_proj",
    "local_params",
    "moe_tp_experts",
    "expert_parallel",
    "whole_sequence",
]
# parameters, compute -> reduce: no step computes with digits that the one before has lost, and none is for nothing.
PRECISIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("float32", "float32"): ("float32",),
    ("float32", "bfloat16"): ("float32", "bfloat16"),
    ("float32", "float16"): ("float32",),
    ("bfloat16", "bfloat16"): ("float32", "bfloat16"),
    ("float64", "float64"): ("float64",),
}


class PipelinePlan(Words):
    """How the model is cut into stages and in what order the stages work."""

    schedule: ScheduleName = "1F1B"
    """The order of forward and backward passes; torch's own names."""
    stages_per_rank: Degree = 1
    """Stages held by one process: 1 for GPipe and 1F1B, 2 for ZBVZeroBubble and DualPipeV, any number for the rest."""
    layers_per_stage: Literal["balanced", "even"] | list[NotNegative] = "balanced"
    """`balanced`: the slowest stage is as fast as can be, by FLOPs; `even`: same number of layers; or the numbers."""
    split_at: list[str] | None = None
    """Instead of `layers_per_stage`: the name of the first layer of each stage but the first."""


class TensorPlan(Words):
    """How single modules are sharded over the tp axis."""

    sequence_parallel: bool = False
    """Between attention and MLP each process keeps only its part of the sequence."""
    loss_parallel: bool = True
    """The logits stay sharded over the vocabulary; the loss is computed on the shards."""
    experts: Literal["tensor", "expert"] = "tensor"
    """How derived rules cut experts: each expert over tp, or whole experts for each process."""
    auto: bool = False
    """Complete these rules for the model at hand; those that match nothing are for other variants of the family."""
    styles: dict[str, Style] = {}
    """Module pattern -> style; `*` stands for one layer number. Every parameter needs exactly one rule when tp > 1.
    Without any the rules are those of the model's family, else they are derived from the model's own plan."""
    fused: dict[str, list[str] | dict[str, int | str]] = {}
    """Pattern of a fused projection (GPT-2's `c_attn`) or of stacked experts -> names of its equal parts; or part ->
    its share, a number or the name of one in the model's configuration."""
    local_attributes: dict[str, list[str]] = {}
    """Module pattern -> attributes that hold a whole width and must count only this process's part."""
    local_inputs: dict[str, list[str]] = {}
    """Module pattern -> inputs that hold something for every attention head (ALiBi): each process takes its heads."""


class ShardPlan(Words):
    """Sharding of parameters, gradients and optimizer state over dp_shard (FSDP2)."""

    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Free gathered parameters after each forward; `auto`: always, but never with a pipeline or without sharding."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu`: parameters, gradients and optimizer state stay in host memory, and the optimizer works there; a layer's
    parameters are on the GPU only while they are used. Without an accelerator it changes nothing."""


class LossScalePlan(Words):
    """Dynamic loss scaling for `compute` = "float16": small gradients would round to zero without it.

    A step whose gradients overflow changes no parameter and counts for neither the learning rate nor AdamW.
    """

    initial: Positive = 65536.0
    """The loss is multiplied by it, and the gradients are divided by it again before they are used."""
    growth_interval: Count = 2000
    """Steps without an overflow after which the scale grows."""
    growth_factor: Annotated[float, Field(gt=1.0, le=LARGEST, allow_inf_nan=False)] = 2.0
    """By how much it grows."""
    backoff_factor: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] = 0.5
    """What an overflow multiplies it with."""
    hysteresis: Count = 2
    """How many overflows since the scale last grew it takes to lower it; after them, every one lowers it again."""
    minimum: Positive = 1.0
    """It is never lower; an overflow there stops the run."""

    @model_validator(mode="after")
    def _starts_in_its_range(self) -> Self:
        if self.initial < self.minimum:
            raise ValueError(f"`initial` = {self.initial} is below `minimum` = {self.minimum}; raise one or lower it")
        return self


class PrecisionPlan(Words):
    """The number formats."""

    parameters: Dtype = "float32"
    """Parameters and optimizer state."""
    compute: ComputeDtype = "float32"
    """Forward and backward; "float16" always works with dynamic loss scaling."""
    reduce: Dtype = "float32"
    """Gradients, while they are summed over microbatches and over the dp axes."""
    loss_scale: LossScalePlan = LossScalePlan()
    """For `compute` = "float16" only."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.reduce not in PRECISIONS.get((self.parameters, self.compute), ()):
            possible = "; ".join(
                f"{parameters}, {compute}, {' or '.join(reduce)}"
                for (parameters, compute), reduce in PRECISIONS.items()
            )
            raise ValueError(
                f"`parameters` = {self.parameters!r}, `compute` = {self.compute!r} and `reduce` = {self.reduce!r} do "
                f"not go together; possible are, in this order: {possible}"
            )
        if self.compute != "float16" and self.loss_scale != LossScalePlan():
            raise ValueError(
                f"`loss_scale` is for `compute` = 'float16', found {self.compute!r}; leave it out, or compute in "
                "float16"
            )
        return self


class RecomputePlan(Words):
    """Activations that are thrown away in the forward pass and computed again in the backward pass."""

    mode: Literal["none", "full", "selective"] = "none"
    """`full`: keep only the input of a layer; `selective`: and the results of its matrix products, its attention and
    its collectives (with tp also the partial sums before them, so it saves less memory there)."""
    every: Count = 1
    """Recompute every k-th layer; the others keep everything."""


class CompilePlan(Words):
    """torch.compile, layer by layer."""

    enabled: bool = False
    """Compile every decoder layer."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`aot_eager` traces but generates no code: quick, for tests."""


class ParallelPlan(Words):
    """Everything about how a model is parallelised. One TOML file under `parallel_plans/`."""

    model_types: list[str] = []
    """The Hugging Face model types this plan is written for; empty: any."""
    model_config_has: dict[str, bool | int | str] = {}
    """Values of the model's configuration this plan is written for; empty: any."""
    mesh: MeshPlan = MeshPlan()
    pipeline: PipelinePlan = PipelinePlan()
    tensor: TensorPlan = TensorPlan()
    shard: ShardPlan = ShardPlan()
    precision: PrecisionPlan = PrecisionPlan()
    recompute: RecomputePlan = RecomputePlan()
    compile: CompilePlan = CompilePlan()
