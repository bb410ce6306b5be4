"""Comparison of two traces: for each kind of value, the largest error and where it is."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from meshtrain.verify.case import Trace

TOLERANCE = 1e-12
# Smallest scale of a tensor, relative to the largest element of all tensors. The gradient of a key
# bias, which softmax ignores, is rounding noise only.
SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Finding:
    """The largest error of a plan in one kind of value.

    Attributes:
        what: the kind of value.
        where: the FQN, or the step, of the largest error.
        error: relative to the largest element; infinite for what is missing or not a number.
        tolerance: the largest error that is allowed.
    """

    what: str
    where: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.tolerance


def compare(
    traces: Sequence[Trace],
    expected: Trace,
    *,
    smallest_scale: float = SMALLEST_SCALE,
    tolerances: Mapping[str, float] = MappingProxyType({}),
) -> list[Finding]:
    """Compare every rank's trace with that of the stock model, and return the findings.

    Args:
        traces: of all ranks.
        expected: of the stock model.
        smallest_scale: 0 measures every tensor at its own scale.
        tolerances: kind of value -> the largest error that is allowed, if it is not `TOLERANCE`.
            Initial weights must be equal.
    """

    def worst(what: str, errors: Mapping[str, float]) -> Finding:
        where = max(errors, key=lambda name: errors[name])
        return Finding(what, where, errors[where], tolerances.get(what, TOLERANCE))

    findings = [_initial(traces, expected)] if expected.initial else []
    kinds = [("loss", "losses"), ("gradient norm", "norms")]
    optional = {
        "cross-entropy": "cross_entropies",
        "z-loss": "z_losses",
        "router loss": "router_losses",
        "router z-loss": "router_z_losses",
    }
    kinds += [(what, name) for what, name in optional.items() if getattr(expected, name)]
    for what, name in kinds:
        pairs = [(getattr(trace, name), getattr(expected, name)) for trace in traces]
        errors = {
            f"step {step + 1}": max(relative_error(found[step], wanted[step]) for found, wanted in pairs)
            for step in range(len(expected.losses))
        }
        findings.append(worst(what, errors))
    gradients = _gradient_errors(traces, expected, smallest_scale, tolerances.get("gradient", TOLERANCE))
    findings.append(worst("gradient", gradients))
    parameters = _tensor_errors([trace.parameters for trace in traces], expected.parameters, smallest_scale)
    findings.append(worst("parameter after 3 steps", parameters))
    if expected.biases:
        findings.append(worst("router bias", _tensor_errors([it.biases for it in traces], expected.biases, 0.0)))
    evaluation = max(relative_error(trace.evaluation, expected.evaluation) for trace in traces)
    findings.append(worst("evaluation loss", {"": evaluation}))
    return findings


def first_divergent_layer(traces: Sequence[Trace], expected: Trace) -> str | None:
    """Return the FQN of the first decoder layer whose output differs, or None.

    Only the outputs for the very first microbatch are compared.
    """
    found: dict[str, list[Tensor]] = {}
    for trace in traces:
        for name, output in trace.layers.items():
            found.setdefault(name, []).append(output)
    for name, wanted in sorted(expected.layers.items(), key=lambda item: _natural(item[0])):
        outputs = found.get(name, [])
        if not all(output.numel() for output in (wanted, *outputs)):
            continue
        if outputs and outputs[0].shape[1] < wanted.shape[1]:
            # With sequence parallelism each rank holds a part, in the order of the ranks.
            outputs = [torch.cat(outputs, dim=1)]
        if any(tensor_error(output, wanted) > TOLERANCE for output in outputs):
            return name
    return None


def are_watched(traces: Sequence[Trace], expected: Trace) -> bool:
    """Return whether the output of any layer was recorded; compiled layers have none."""
    return any(name in trace.layers and wanted.numel() for name, wanted in expected.layers.items() for trace in traces)


def relative_error(found: float, wanted: float) -> float:
    """Return the relative difference; infinite if either is not a number."""
    error = abs(found - wanted) / max(abs(wanted), 1e-300)
    return error if math.isfinite(error) else math.inf


def tensor_error(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    """Return the largest difference relative to the largest element or `scale`.

    The larger of the two is used. A difference relative to 0, or between shapes, is infinite.
    """
    if found.shape != wanted.shape:
        return math.inf
    if wanted.numel() == 0:
        return 0.0
    difference, largest = (found - wanted).abs().max().item(), wanted.abs().max().item()
    if difference == 0.0:
        return 0.0
    whole = max(largest, scale)
    # Relative to zeros, every difference is infinite.
    error = difference / whole if whole else math.inf
    return error if math.isfinite(error) else math.inf


def _initial(traces: Sequence[Trace], expected: Trace) -> Finding:
    errors = _tensor_errors([trace.initial for trace in traces], expected.initial, SMALLEST_SCALE)
    where = max(errors, key=lambda name: errors[name])
    return Finding("initial weights", where, errors[where], 0.0)


def _gradient_errors(
    traces: Sequence[Trace], expected: Trace, smallest_scale: float, tolerance: float
) -> dict[str, float]:
    """Return FQN -> error, up to the first step that differs: later gradients differ too."""
    errors: dict[str, float] = {}
    for step, wanted in enumerate(expected.gradients):
        found = [trace.gradients[step] for trace in traces]
        # A missing gradient equals a gradient of zeros.
        zeros = {name: torch.zeros_like(tensor) for tensors in [wanted, *found] for name, tensor in tensors.items()}
        missing = {name: zeros[name] for name in zeros if not any(name in tensors for tensors in found)}
        for name, error in _tensor_errors([*found, missing], {**zeros, **wanted}, smallest_scale).items():
            errors[name] = max(errors.get(name, 0.0), error)
        if max(errors.values()) > tolerance:
            break
    return errors


def _tensor_errors(
    found: Sequence[Mapping[str, Tensor]], wanted: Mapping[str, Tensor], smallest_scale: float
) -> dict[str, float]:
    """Return FQN -> error; infinite for what no rank has, or the stock model has not."""
    scale = smallest_scale * max((tensor.abs().max().item() for tensor in wanted.values() if tensor.numel()), default=0)
    errors = {name: math.inf for name in wanted if not any(name in tensors for tensors in found)}
    for tensors in found:
        for name, tensor in tensors.items():
            error = tensor_error(tensor, wanted[name], scale) if name in wanted else math.inf
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"\.", name)]
