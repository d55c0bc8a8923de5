"""DeepSpeed #3844: a fused weight was cut in one piece, where each rank takes its part of every section.

Shows as: a rank's shard holds other rows than its placement says; no error, wrong results.
"""

import torch

from colonnade import ParallelMode, Shard, place
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Packed(models.TensorMLP):
    """A gate and an up weight in one: rows of the gate first, then those of up. Each rank has its part of both."""

    sections = (models.INNER // 2, models.INNER // 2)

    def __init__(self, context):
        super().__init__(context)
        self.down.weight = models.own_part(torch.randn(models.WIDTH, models.INNER // 2), 1, context)
        for parameter in (self.up.weight, self.up.bias):
            shard = Shard(0, sections=self.sections) if self.sections else Shard(0)
            place(parameter, {ParallelMode.TENSOR: shard}, shape=(models.INNER, *parameter.shape[1:]))

    def inside(self, x):
        gate, up = torch.nn.functional.linear(x, self.up.weight, self.up.bias).chunk(2, -1)
        return torch.nn.functional.linear(torch.tanh(gate) * up, self.down.weight)


class CutInOne(Packed):
    sections = ()


BUG = Bug(
    "DeepSpeed #3844",
    "a fused weight is sharded as if it were a single weight",
    "shards-interleaved",
    layout={"tensor": 2},
    kind=Kind(Packed),
)


def plant(run: Run) -> None:
    run.model = CutInOne
