"""Averages of metrics over the steps of an epoch."""

import math
from collections import defaultdict
from collections.abc import Mapping

AVERAGED = (
    "loss",
    "tokens_per_second",
    "teraflops_per_second",
    "memory_bytes",
    "seconds",
    "data_seconds",
    "forward_backward_seconds",
    "optimizer_seconds",
)


class EpochAverages:
    """Averages over the steps of the latest epoch, including those before a resume."""

    def __init__(self) -> None:
        self._epoch = 0
        self._steps = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Add a step to the averages. Other objects and values that are not finite do not count."""
        if "loss" not in metrics:
            return
        epoch = metrics["epoch"]
        assert epoch is not None
        if epoch != self._epoch:
            self._epoch, self._steps = int(epoch), 0
            self._sums.clear()
            self._counts.clear()
        self._steps += 1
        for name in AVERAGED:
            value = metrics[name]
            if value is not None and math.isfinite(value):
                self._sums[name] += value
                self._counts[name] += 1

    def averages(self) -> dict[str, float]:
        """Return the averages as metrics of the epoch."""
        averages = {f"epoch_{name}": total / self._counts[name] for name, total in self._sums.items()}
        return {"epoch": self._epoch, "epoch_steps": self._steps, **averages}
