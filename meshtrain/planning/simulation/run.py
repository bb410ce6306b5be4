"""What the simulation of a run needs."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from meshtrain.config.ema import NO_EMA, EmaConfig
from meshtrain.config.lora import NO_LORA, LoraConfig
from meshtrain.config.objective import STOCK_OBJECTIVE, ObjectiveConfig
from meshtrain.config.optimizer import OptimizerConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.preference import NO_PREFERENCE, PreferenceConfig
from meshtrain.config.run import RouterConfig
from meshtrain.parallel.check import BatchShape
from meshtrain.training.distillation.teacher import Teacher


@dataclass(frozen=True)
class SimulatedRun:
    """What the simulation of a run needs, in a form that can be sent to other processes.

    Attributes:
        hf_config: of the model.
        attention: its implementation.
        trust_remote_code: whether the code of the model may come from its folder.
        plan: resolved.
        batch: shape of the batches.
        inputs: names of the inputs besides `input_ids` and `labels`.
        optimizer: of the run.
        router: of the run.
        lora: of the run.
        objective: of the run.
        preference: of the run.
        has_weights: whether its labels have weights.
        teacher: of the run.
        ema: of the run.
        granularity: of the allocator in bytes.
        on_gpus: whether attention runs as on GPUs; otherwise as on the CPU.
        layers: indices of the layers of the model that exist, ascending; None: all.
    """

    hf_config: PretrainedConfig
    attention: str
    trust_remote_code: bool
    plan: ParallelPlan
    batch: BatchShape
    inputs: tuple[str, ...]
    optimizer: OptimizerConfig
    router: RouterConfig
    lora: LoraConfig = NO_LORA
    objective: ObjectiveConfig = STOCK_OBJECTIVE
    preference: PreferenceConfig = NO_PREFERENCE
    has_weights: bool = False
    teacher: Teacher | None = None
    ema: EmaConfig = NO_EMA
    granularity: int = 1
    on_gpus: bool = False
    layers: tuple[int, ...] | None = None
