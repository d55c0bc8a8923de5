"""Parameters that a plan leaves whole must have the whole gradient on every tensor rank: compared once, in the first step.

One that each rank uses for its own part of the features (a norm of each head) has a part of the gradient on each rank, and
owes a sum. A plan that forgets it trains wrongly without a word.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import agreed_errors, message_device
from colonnade.comm.torch_versions import gather_rows
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import GradientError, listed
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.held import whole_parameters
from colonnade.parallel.placement import is_dtensor
from colonnade.plans.match import is_cut_by_plan

_SAMPLED = 1 << 16
"""How many elements of a gradient are looked at, evenly spread."""


class SameGradients:
    """Looks at raw gradients as backward passes make them; of a model that no plan has cut, at none."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context = context
        self._watched: dict[str, nn.Parameter] = {}
        self._sums: dict[str, Tensor] = {}
        if context.tensor_parallel_size > 1 and is_cut_by_plan(model):
            whole = whole_parameters(model, context, ParallelMode.TENSOR)
            named = model.named_parameters()
            self._watched = {name: p for name, p in named if id(p) in whole and p.requires_grad}
        self.is_due = bool(self._watched)
        # FSDP has gradients in other tensors until they are summed; those are looked at afterwards.
        plain = [(name, parameter) for name, parameter in self._watched.items() if not is_dtensor(parameter)]
        self._handles = [parameter.register_hook(partial(self._add, name)) for name, parameter in plain]

    def check(self, complete: bool) -> None:
        """Raise on every rank if tensor ranks differ. Collective over the world; not in a step of which a pass has failed."""
        for name, parameter in self._watched.items():
            if is_dtensor(parameter) and parameter.grad is not None:
                self._add(name, local_part(parameter.grad))
        sizes = [self._sums[name].tolist() if name in self._sums else [0.0, 0.0] for name in self._watched]
        mine = torch.tensor(
            [float(complete), *(number for pair in sizes for number in pair)], dtype=torch.float64, device="cpu"
        )
        mine = mine.to(message_device(self._context.device))
        rows = gather_rows(mine, self._context.get_group(ParallelMode.TENSOR)).cpu()
        self._sums.clear()
        if bool((rows[:, 0] == 1).all()):
            names, dtypes = list(self._watched), [parameter.dtype for parameter in self._watched.values()]
            self.close()
            with agreed_errors(self._context.device):
                _compare(names, dtypes, rows[:, 1:].reshape(len(rows), -1, 2))

    def close(self) -> None:
        """Look no longer."""
        self.is_due = False
        for handle in self._handles:
            handle.remove()
        self._watched, self._handles = {}, []

    def _add(self, name: str, gradient: Any) -> None:
        """Add what tells one gradient from another: its length along a fixed direction, and its norm squared."""
        if gradient.layout is not torch.strided or not gradient.numel():
            return
        with torch.no_grad():
            some = gradient.detach().reshape(-1)[:: -(-gradient.numel() // _SAMPLED)].double()
            along = torch.cos(torch.arange(len(some), device=some.device, dtype=torch.float64) * 1.7)
            found = torch.stack([(some * along).sum(), some.square().sum()])
            self._sums[name] = self._sums[name] + found if name in self._sums else found


def _compare(names: list[str], dtypes: list[torch.dtype], sums: Tensor) -> None:
    """`sums`: of every rank, for each name. What is far smaller than the largest gradient may be nothing but rounding."""
    along, norms = sums[..., 0], sums[..., 1].sqrt()
    largest, longest = norms.max(), norms.max(0).values
    apart = torch.maximum((along - along[:1]).abs().max(0).values, (norms - norms[:1]).abs().max(0).values)
    found = []
    for name, dtype, distance, norm in zip(names, dtypes, apart.tolist(), longest.tolist(), strict=True):
        rounding = 100 * torch.finfo(dtype).eps
        if norm > rounding * largest and distance > min(max(rounding, 1e-3), 0.1) * norm:
            found.append(name)
    if found:
        raise GradientError(
            f"the plan leaves {listed(map(repr, found[:8]))}{' ...' if len(found) > 8 else ''} whole, but the ranks of the "
            f"tensor group have different gradients of it: each rank uses it for its own part of the features. Give its layer "
            f"the style 'replicated_with_grad_allreduce' in the plan, so that the gradients are summed",
            code="C047",
        )
