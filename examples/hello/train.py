"""The first script to run: four ranks, data 2 x tensor 2; each rank prints its position in every group."""

import torch
import torch.distributed as dist

import colonnade
from colonnade import ParallelMode

gpc = colonnade.launch(dict(parallel=dict(tensor=dict(size=2, mode="1d"))), verbose=False)

if gpc.get_global_rank() == 0:
    print(gpc.layout.describe())
dist.barrier()

for mode in (ParallelMode.DATA, ParallelMode.TENSOR):
    total = torch.tensor([10.0 ** gpc.get_global_rank()], device=gpc.device)
    dist.all_reduce(total, group=gpc.get_group(mode))
    print(
        f"rank {gpc.get_global_rank()} is {gpc.get_local_rank(mode)} of {gpc.get_ranks_in_group(mode)} in {mode.name}: "
        f"the group sums to {total.item():.0f}"
    )

gpc.destroy()
