"""The function form beside torch's own: the same signature and meaning in one process, right in a world of several."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context
from colonnade.errors import ConfigError, GradientError
from colonnade.optim import clip
from colonnade.optim.clip import _device, clip_grad_norm_, grad_norm
from colonnade.parallel.placement import Shard, place
from colonnade.testing import run_world
from tests.optim.watch import collectives
from tests.ranks import on_ranks

ORDERS = [1.0, 2.0, 3.0, 2.5, 0.5, math.inf]
KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 5), (1030,), (70, 33)]
THEIRS: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_


def held(dtype: torch.dtype = torch.float64, scale: float = 1.0, seed: int = 1) -> list[nn.Parameter]:
    """Parameters with seeded gradients, and one without."""
    source = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=source, dtype=wide)).to(dtype)
    return [*made, nn.Parameter(torch.zeros(4, dtype=dtype))]


def reference(parameters: Iterable[Tensor], p: float) -> float:
    """In fp64, on everything at once."""
    flat = [q.grad.flatten() for q in parameters if q.grad is not None]
    wide = [values.to(torch.complex128 if values.is_complex() else torch.float64).abs() for values in flat]
    return float(torch.linalg.vector_norm(torch.cat(wide), p))


def test_the_signature_is_torchs_and_one_keyword_more() -> None:
    ours, theirs = inspect.signature(clip_grad_norm_), inspect.signature(THEIRS)
    own = ours.parameters["context"]
    assert own.kind is inspect.Parameter.KEYWORD_ONLY
    assert own.default is None
    shared = [parameter for name, parameter in ours.parameters.items() if name != "context"]
    assert [(p.name, p.default, p.kind) for p in shared] == [
        (p.name, p.default, p.kind) for p in theirs.parameters.values()
    ]
    assert colonnade.clip_grad_norm_ is clip_grad_norm_
    assert colonnade.grad_norm is grad_norm


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("max_norm", [1.0, 1e6, math.inf, 0.0])
def test_norms_and_gradients_are_torchs(dtype: torch.dtype, p: float, max_norm: float) -> None:
    ours, theirs = held(dtype), held(dtype)
    if math.isinf(p):  # torch's own has no maximum of an empty gradient
        ours, theirs = [[q for q in both if q.numel()] for both in (ours, theirs)]
    norm, wanted = clip_grad_norm_(ours, max_norm, p), THEIRS(theirs, max_norm, p)
    rtol = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    torch.testing.assert_close(norm, wanted, rtol=rtol, atol=0, check_dtype=False)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=2 * rtol, atol=1e-300)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", KINDS)
def test_every_dtype_and_order_against_fp64(dtype: torch.dtype, p: float) -> None:
    parameters = held(dtype)
    true = reference(parameters, p)
    norm = grad_norm(parameters, p)
    double = dtype in (torch.float64, torch.complex128)
    assert norm.item() == pytest.approx(true, rel=1e-12 if double else 2e-6 if p >= 1 else 1e-5)
    assert (norm.dtype, norm.dim(), type(norm)) == (torch.float64, 0, Tensor)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 300.0), (torch.bfloat16, 1e15)])
def test_half_precision_is_measured_beyond_its_own_range(dtype: torch.dtype, scale: float) -> None:
    parameters = held(dtype, scale)
    true = reference(parameters, 2.0)
    assert clip_grad_norm_(parameters, true / 4).item() == pytest.approx(true, rel=1e-6)
    assert reference(parameters, 2.0) == pytest.approx(true / 4, rel=2e-3)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e25), (torch.bfloat16, 1e25), (torch.float64, 1e200)])
def test_where_squares_overflow_the_norm_is_inf_and_never_a_plausible_number(dtype: torch.dtype, value: float) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.full((3,), value, dtype=dtype)
    assert math.isinf(grad_norm(parameter).item())
    assert grad_norm(parameter, math.inf).item() == parameter.grad[0].item()


def test_what_may_be_passed() -> None:
    true = reference(held(), 2.0)
    parameters = held()
    assert clip_grad_norm_((q for q in parameters), true / 2).item() == pytest.approx(true, rel=1e-12)
    assert reference(parameters, 2.0) == pytest.approx(true / 2, rel=1e-6)
    alone = held()[3]
    assert clip_grad_norm_(alone, 0.5).item() == pytest.approx(reference(held()[3:4], 2.0), rel=1e-12)
    assert reference([alone], 2.0) == pytest.approx(0.5, rel=1e-6)
    twice = held()
    assert grad_norm([*twice, *twice]).item() == pytest.approx(true, rel=1e-12)
    assert clip_grad_norm_({"a": alone}.values(), 1, foreach=True).dim() == 0
    assert clip_grad_norm_(held(), 1.0, "inf").item() == reference(held(), math.inf)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_nothing_to_measure_is_zero(p: float) -> None:
    assert clip_grad_norm_([], 1.0, p).item() == 0.0
    assert clip_grad_norm_(iter([]), 1.0, p).item() == 0.0
    assert clip_grad_norm_(nn.Parameter(torch.zeros(3)), 1.0, p).item() == 0.0
    empty = nn.Parameter(torch.zeros(0, 2))
    empty.grad = torch.zeros(0, 2)
    assert clip_grad_norm_(empty, 1.0, p, error_if_nonfinite=True).item() == 0.0


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_non_finite_gradients_come_out_as_torchs_do(bad: float, p: float, max_norm: float) -> None:
    ours, theirs = [[q for q in held() if q.numel()] for _ in range(2)]
    for parameters in (ours, theirs):
        for at in (1, 2):  # in two gradients
            parameters[at].grad.view(-1)[2] = bad
    norm, wanted = clip_grad_norm_(ours, max_norm, p), THEIRS(theirs, max_norm, p)
    assert str(norm.item()) == str(wanted.item()) == str(bad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def test_error_if_nonfinite_leaves_the_gradients_alone() -> None:
    parameters = held()
    parameters[2].grad[0, 0] = math.nan
    before = [None if q.grad is None else q.grad.clone() for q in parameters]
    with pytest.raises(GradientError, match=r"order 2.0 is nan.*error_if_nonfinite=False"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError):  # as torch's
        grad_norm(parameters, error_if_nonfinite=True)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, old, equal_nan=True)
    assert math.isfinite(clip_grad_norm_(held(), 1.0, error_if_nonfinite=True).item())


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_limits_that_are_none(max_norm: float) -> None:
    with pytest.raises(ConfigError, match="max_norm must be a number > 0"):
        clip_grad_norm_(held(), max_norm)


def test_the_norm_is_joined_where_a_gradient_lies_that_is_not_on_the_host() -> None:
    host, device = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"))
    assert _device([host, device, host], None) == torch.device("meta")
    assert _device([host], None) is None
    context: Any = SimpleNamespace(device=torch.device("cuda:1"))
    assert _device([host], context) == torch.device("cuda:1")


def test_dtensors_in_a_world_of_one() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor import Replicate as TorchReplicate

    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        assert clip._context(gpc) is gpc
        assert clip._context(ParallelContext()) is None
        mesh = init_device_mesh("cpu", (1, 1))
        wholly = [TorchReplicate(), TorchReplicate()]
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, wholly))
        parameter.grad = DTensor.from_local(torch.full((4,), 3.0), mesh, wholly)
        assert clip_grad_norm_([parameter], 3.0).item() == pytest.approx(6.0)
        assert parameter.grad.to_local().tolist() == pytest.approx([1.5] * 4)
        parameter.grad = DTensor.from_local(torch.full((4,), math.nan), mesh, wholly)
        assert math.isnan(grad_norm(parameter).item())
        with pytest.raises(GradientError, match=r"order 2.0 is nan"):  # no word of stages
            grad_norm(parameter, error_if_nonfinite=True)
        pending = DTensor.from_local(torch.ones(4), mesh, [TorchReplicate(), Partial()])
        with pytest.raises(GradientError, match="pending sum"):
            grad_norm([SimpleNamespace(grad=pending, device=torch.device("cpu"))])  # type: ignore[list-item]


# -- in a world -------------------------------------------------------------------------------------------


def _unlaunched() -> tuple[float, int]:
    """Plain tensors and no context: every rank by itself, as torch."""
    parameters = held(seed=dist.get_rank())
    with collectives() as called:
        norm = clip_grad_norm_(parameters, 1e9)
    assert norm.item() == pytest.approx(reference(parameters, 2.0), rel=1e-12)
    return norm.item(), len(called)


@pytest.mark.slow
def test_without_a_context_plain_tensors_are_this_process_alone() -> None:
    values = run_world(2, _unlaunched).values
    assert [called for _, called in values] == [0, 0]
    assert values[0][0] != values[1][0]


def _launched(by_name: bool) -> tuple[float, float, bytes]:
    """(norm, true norm, bits of the norm), with the context passed or taken from the library's global one."""
    context = None if by_name else global_context
    with launch({"parallel": {"tensor": 2}}, context=context or ParallelContext(), verbose=False) as gpc:
        whole = torch.randn(6, 70, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        at = gpc.get_local_rank(ParallelMode.TENSOR)
        cut = place(nn.Parameter(torch.zeros(3, 70, dtype=torch.float64)), {ParallelMode.TENSOR: Shard(0)})
        cut.grad = whole[3 * at : 3 * at + 3].clone()
        copy = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        copy.grad = torch.arange(5.0, dtype=torch.float64)
        true = math.hypot(whole.norm().item(), copy.grad.norm().item())
        norm = clip_grad_norm_([cut, copy], 1.0, context=gpc) if by_name else clip_grad_norm_([cut, copy], 1.0)
        return norm.item(), true, norm.numpy().tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False])
def test_a_launched_context_is_passed_or_found(by_name: bool) -> None:
    values = run_world(4, _launched, by_name, env={"CUDA_VISIBLE_DEVICES": ""}).values
    assert len({bits for _, _, bits in values}) == 1
    for norm, true, _ in values:
        assert norm == pytest.approx(true, rel=1e-12)


@on_ranks(4)
def test_dtensors_of_pipeline_stages_need_a_context_which_knows_that_they_are_no_copies():
    """Every stage of a pipeline has DTensors of its own on the ranks of its stage: (norm with a context, true norm)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor import distribute_tensor

    def parameter_of(stage: int, mesh: Any) -> nn.Parameter:
        made = nn.Parameter(distribute_tensor(wholes[stage], mesh, [TorchShard(0)], src_data_rank=None))
        made.grad = distribute_tensor(wholes[stage], mesh, [TorchShard(0)], src_data_rank=None)
        return made

    wholes = [torch.randn(4, 3, generator=torch.Generator().manual_seed(at), dtype=torch.float64) for at in range(2)]
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = square.get_local_rank("pp")
    mine, copied = parameter_of(stage, square["tp"]), parameter_of(0, square["tp"])
    assert grad_norm(copied).item() == pytest.approx(wholes[0].norm().item(), rel=1e-12)
    for held in ([mine], [mine, copied]):
        with pytest.raises(GradientError, match=r"have different gradients.*pipeline.*context="):
            clip_grad_norm_(held, 1.0, error_if_nonfinite=True)
        assert math.isnan(grad_norm(held).item())
    assert torch.equal(mine.grad.to_local(), wholes[stage].chunk(2)[square.get_local_rank("tp")])
    with launch({"parallel": {"pipeline": 2, "tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        mine = parameter_of(gpc.get_local_rank(ParallelMode.PIPELINE), gpc.device_mesh(ParallelMode.TENSOR))
        norm, true = clip_grad_norm_([mine], 1.0, context=gpc).item(), torch.stack(wholes).norm().item()
    assert norm == pytest.approx(true, rel=1e-12)
