"""Pipelines with the weights of a stock model, and folders to compare."""

from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PrecisionPlan
from meshtrain.models.build import build_meta_model, load_hf_config
from meshtrain.models.initialize import restore_buffers
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import init_mesh
from meshtrain.verify.reference import build_stock, copy_weights_into
from tests.parity import MODELS, Case, build, fill, stock_weights


def assert_same(folder: Path, stock: Path) -> None:
    """Check that two folders have equal files, byte for byte."""
    here, there = ({file.name: file.read_bytes() for file in where.iterdir()} for where in (folder, stock))
    assert here.keys() == there.keys()
    for name in there:
        assert here[name] == there[name], name


def pipeline_of(case: Case) -> Pipeline:
    """Build the pipeline of a case with the weights of the stock model."""
    pipeline = build(case)
    fill(pipeline, stock_weights(case.model))
    return pipeline


def stock_of(model: str) -> PreTrainedModel:
    """Build the stock model in one process."""
    stock = build_stock(load_hf_config(MODELS[model]))
    copy_weights_into(stock, stock_weights(model))
    return stock


def tiny_pipeline(config: PretrainedConfig, mesh: MeshPlan) -> Pipeline:
    """Build a model in float32 with its computed buffers and without parameter values."""
    model = build_meta_model(config, dtype=torch.float32, attention="eager")
    plan = with_family(ParallelPlan(mesh=mesh, precision=PrecisionPlan(compute="float32")), config.model_type)
    world_size = mesh.pp * mesh.dp_replicate * mesh.dp_shard * mesh.tp
    plan = resolve_plan(plan, model, BatchShape(4, 1, 8), world_size)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=1, seed=0, device=torch.device("cpu")
    )
    for stage in pipeline.stages:
        restore_buffers(stage.model)
    return pipeline
