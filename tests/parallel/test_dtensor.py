"""DTensors: their placements are read from the mesh they lie on, and what a rank holds of them from themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import PlacementError
from colonnade.parallel.placement import (
    Placement,
    Replicate,
    Shard,
    as_dtensor,
    check_ties,
    copy_placement,
    effective_placement,
    local_part,
    note_source,
    place,
)
from colonnade.proof.planner.ranks import fake_rank


def test_what_a_mesh_says_of_a_parameter():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor import Replicate as R
    from torch.distributed.tensor import Shard as S

    context = ParallelContext()
    with fake_rank(load_config({"parallel": {"tensor": 2}}), 4, 1, context):  # rank = 2 * data + tensor
        mesh, row = init_device_mesh("cpu", (2, 1, 2)), init_device_mesh("cpu", (4,))
        crossed = DeviceMesh("cpu", [1, 2])

        def made(*placements, on=mesh):
            return DTensor.from_local(torch.arange(6.0).view(3, 2), on, placements, run_check=False)

        def found(tensor):
            return effective_placement(tensor, context.layout, 1)

        split = made(S(0), R(), S(1))
        assert found(split) == Placement(
            {M.DATA: Shard(0, owes="nothing"), M.TENSOR: Shard(1, owes="nothing")}, tuple(split.shape)
        )
        assert tuple(split.shape) == (6, 4)
        half = made(R(), S(0), S(0))
        assert found(half).modes == {M.DATA: Replicate("nothing"), M.TENSOR: Shard(0, owes="nothing")}
        (mode,) = found(made(S(0), on=row)).modes
        assert list(context.layout.group_of(mode, 1)) == [0, 1, 2, 3]
        with pytest.raises(PlacementError, match="pending sum"):
            found(made(R(), R(), Partial()))
        with pytest.raises(
            PlacementError, match=r"mesh dimension of ranks \[1, 2\], but these ranks are not a group of any mode"
        ):
            found(made(R(), on=crossed))
        # what was placed by hand before lies outside
        whole = place(torch.zeros(3, 2), {M.PIPELINE: Shard(1)})
        outer = made(S(0), R(), R())
        copy_placement(whole, outer)
        assert found(outer).modes == {
            M.PIPELINE: Shard(1),
            M.DATA: Shard(0, owes="nothing"),
            M.TENSOR: Replicate("nothing"),
        }
        plain = torch.zeros(2)
        assert found(plain) == Placement()
        assert local_part(plain) is local_part(plain, split) is plain
        everywhere = made(R(), R(), R()).requires_grad_()
        assert not local_part(everywhere).requires_grad
        assert local_part(everywhere).tolist() == local_part(everywhere, made(R(), R(), R())).tolist()
        assert local_part(everywhere, made(R(), R(), S(1))).tolist() == [[1.0], [3.0], [5.0]]
        again = as_dtensor(torch.ones(3, 2), split)
        assert (again.placements, again.shape, again.stride()) == (split.placements, split.shape, split.stride())
        assert again.to_local().eq(1).all()


# -- sources ----------------------------------------------------------------------------------------------
# Weights that were one stay one: two parts of one whole, or two parameters in one memory, are refused.


def layers(trained: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """Two layers, the weights of which came from one."""
    first, second, whole = nn.Linear(2, 2), nn.Linear(2, 2), torch.zeros(4, 2)
    for layer in (first, second):
        note_source(layer.weight, whole)
    second.weight.requires_grad_(trained)
    return first, second


def test_two_parts_of_one_whole_are_refused_if_both_are_trained() -> None:
    first, second = layers()
    for modules in ([nn.ModuleList([first, second])], [first, second]):
        with pytest.raises(PlacementError, match=r"weight' and '.*weight' come from one full parameter"):
            check_ties(modules)
    for order in (layers(trained=False), reversed(layers(trained=False))):
        check_ties(order)
    second.weight = first.weight
    check_ties([nn.ModuleList([first, second])])
    apart = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    check_ties([apart])
    for layer in apart:
        note_source(layer.weight, torch.zeros(4, 2))
    check_ties([apart])


def test_two_parameters_in_one_memory_are_refused_in_one_module() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = nn.Parameter(first.weight.data)
    both = nn.ModuleList([first, second])
    with pytest.raises(PlacementError, match=r"'0.weight' and '1.weight' share memory"):
        check_ties([both])
    check_ties([first, second])  # stages of one model
    second.weight.requires_grad_(False)
    check_ties([both])
    check_ties([both.to("meta").requires_grad_()])
    check_ties([nn.ParameterList([torch.zeros(0), torch.zeros(0)])])
