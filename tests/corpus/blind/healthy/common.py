"""Data, process group start and the planted bug, shared by the scripts of this folder."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def start(seed=0):
    """Join the process group that torchrun describes (a world of one without it)."""
    defaults = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def world_size():
    """Number of ranks, before a process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def loader(*tensors, batch=4, **options):
    """Batches of this rank."""
    data = tensors[0] if len(tensors) == 1 and not torch.is_tensor(tensors[0]) else TensorDataset(*tensors)
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=batch, sampler=sampler, **options)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(high, *shape, seed=2):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def average_gradients(*models):
    """The mean of the gradients of all ranks, as DDP computes it."""
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def factor():
    """2 in the planted version on several ranks, 1 otherwise."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return 2 if os.environ.get("PLANT") == "1" and several else 1


def plant(parameter):
    """With PLANT=1 and several ranks: double the gradient of the parameter before any reduction."""
    if factor() == 2:
        parameter.register_hook(lambda gradient: 2 * gradient)


def plant_fsdp(module, name="weight"):
    """The same for a module that FSDP2 gathers: its gathered weight exists from its first forward pass."""
    seen = set()

    def look(module, inputs):
        parameter = getattr(module, name)
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            parameter.register_hook(lambda gradient: 2 * gradient)

    if factor() == 2:
        module.register_forward_pre_hook(look)
