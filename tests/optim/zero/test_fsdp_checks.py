"""The order of collectives among two ranks, of which one is told: what it says at each place, and when it asks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.zero import fsdp_checks
from colonnade.optim.zero.fsdp_checks import STEP, Event, RunOrder

A, B, C = Event("gathers a"), Event("gathers b"), Event("gathers c")


class Other:
    """Rank 1: says what rank 0 says, unless `differ` changes the row (place, code, whether it stepped)."""

    def __init__(self) -> None:
        self.differ: Callable[[list[int]], list[int]] = list
        self.text: list[Any] = []
        self.sent: list[list[int]] = []

    def gather(self, everyone: Tensor, mine: Tensor) -> Any:
        self.sent.append(mine[0].tolist())
        come = torch.tensor([self.sent[-1], self.differ(self.sent[-1])])
        everyone.zero_()  # until somebody waits for it
        return SimpleNamespace(wait=lambda: everyone.copy_(come))


@pytest.fixture
def other(monkeypatch):
    rank = Other()
    monkeypatch.setattr(fsdp_checks.dist, "get_process_group_ranks", lambda group: [4, 6])
    monkeypatch.setattr(fsdp_checks, "separate_gloo_gather", lambda group: rank.gather)
    monkeypatch.setattr(fsdp_checks, "gather_json_by", lambda gather, size, mine: [mine, rank.text or mine])
    return rank


def order_of() -> RunOrder:
    return RunOrder(None)  # type: ignore[arg-type]


def run(order: RunOrder, *events: Event, replayed: list[Event] | None = None) -> None:
    for event in events:
        order.issue(event, lambda event=event: (replayed if replayed is not None else []).append(event))


def test_the_first_step_asks_before_each_collective_and_later_ones_once(other):
    order = order_of()
    run(order, A, B)
    order.step()
    assert other.sent == [[1, A.code, 0], [2, B.code, 0], [3, STEP.code, 0]]
    for _ in range(2):
        other.sent.clear()
        run(order, A, B)
        order.step()
        assert other.sent == [[0, 0, 1]]


def test_ranks_that_leave_the_plan_together_go_on_and_twice_makes_a_new_plan(other):
    order, replayed = order_of(), []
    run(order, A, B, replayed=replayed)
    order.step()
    for times in range(3):
        other.sent.clear()
        run(order, A, A)  # the plan has B here: those who keep to it are freed first
        order.step()
        assert replayed == [B] * min(times + 1, 2)
    assert other.sent == [[0, 0, 1]]  # of the new plan
    run(order, A, B)
    assert other.sent[-1][:2] == [2, B.code]


def test_an_evaluation_between_two_steps_is_no_plan(other):
    order, replayed = order_of(), []
    run(order, A, B, replayed=replayed)
    order.step()
    run(order, B)
    assert replayed == [A, B]
    run(order, A, B)
    order.step()
    for _ in range(2):  # the plan is the old one
        other.sent.clear()
        run(order, A, B)
        order.step()
        assert other.sent == [[0, 0, 1]]


def test_a_step_in_the_middle_of_the_plan_frees_those_who_keep_to_it(other, monkeypatch):
    order, replayed, waited = order_of(), [], []
    run(order, A, B, replayed=replayed)
    order.step()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(1))
    other.sent.clear()
    run(order, A)
    order.step()
    assert other.sent == [[2, STEP.code, 1]]
    assert (replayed, waited) == ([B], [1])


def test_a_whole_step_without_a_step_was_dropped(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.sent.clear()
    run(order, A, B)
    run(order, A, B)
    order.step()
    assert other.sent == [[0, 0, 1], [0, 0, 0]]
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    run(order, A, B)
    with pytest.raises(GradientError, match="the numbers of optimizer steps differ"):
        run(order, A)  # what was said at the end of the plan is read before it begins again


def test_what_was_said_in_a_backward_pass_is_read_at_its_end(other):
    order = order_of()
    run(order, A)
    order.step()
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: run(order, A))
    with pytest.raises(GradientError, match="the numbers of optimizer steps differ"):
        y.sum().backward()


@pytest.mark.parametrize("followed", [0, 2])
def test_once_is_no_plan_and_twice_in_a_row_is_one_however_long_the_plan_was_kept(other, followed):
    order, plan = order_of(), [A, B]
    run(order, *plan)
    order.step()

    def steps(events: list[Event], count: int, sent: int) -> None:
        for _ in range(count):
            other.sent.clear()
            run(order, *events)
            order.step()
            assert len(other.sent) == sent

    for new in ([A, A], [A, C], [A, B]):
        steps(plan, followed, 1)
        steps(new, 1, 2)  # leaves the plan, and compares each one after that
        steps(plan, 1 + followed, 1)  # is still the plan
        steps(new, 2, 2)
        steps(new, 1, 1)
        plan = new


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_first_difference_is_named_with_the_step(other, steps):
    order = order_of()
    for _ in range(steps):
        run(order, A, B)
        order.step()
    run(order, A)
    other.differ = lambda row: [row[0], row[1] + 1, row[2]]
    other.text = [1, "gathers c", bool(steps)]
    with pytest.raises(GradientError, match=rf"step {steps + 1}: .* 4, 6 .*rank 4 gathers d; rank 6 gathers c\."):
        run(order, Event("gathers d"))


def test_a_rank_that_follows_the_plan_is_named_by_what_comes_next_in_it(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.differ = lambda row: [0, 0, 1]
    other.text = [None, "None", True]
    with pytest.raises(GradientError, match=r"rank 4 gathers b; rank 6 gathers a\."):
        run(order, B)


@pytest.mark.parametrize(
    ("plan", "mine", "theirs", "told"),
    [
        ([A, B], [], [1, "gathers c", True], r"rank 4 gathers d; rank 6 gathers a\."),  # the first place counts
        ([A, B], [A], [0, "gathers c", True], r"rank 4 gathers a; rank 6 gathers c\."),
        ([A, B], [A, A], [3, "gathers c", False], r"rank 4 gathers d; rank 6 steps the optimizer\."),  # after the plan
        ([A, B], [A], [1, "gathers c", False], r"rank 4 gathers d, after a step; rank 6 gathers c, without a step\."),
    ],
)
def test_the_first_place_where_ranks_part_is_told(other, plan, mine, theirs, told):
    order = order_of()
    run(order, *plan)
    order.step()
    run(order, *mine)
    other.differ = lambda row: [row[0], row[1] + 1, row[2]]
    other.text = theirs
    with pytest.raises(GradientError, match=told):
        run(order, Event("gathers d"))


def test_a_collective_is_announced_and_can_be_repeated_with_zeros(monkeypatch):
    did: list[Any] = []
    order: Any = SimpleNamespace(issue=lambda event, replay: did.append((event, replay)))

    def noted(name: str) -> Any:
        def run(output: Tensor, given: Tensor, **more: Any) -> str:
            did.append((name, output.shape, output.dtype, given.tolist(), more))
            return f"work of {name}"

        return run

    monkeypatch.setattr(fsdp_checks, "all_gather_flat", noted("gather"))
    monkeypatch.setattr(fsdp_checks, "reduce_scatter_flat", noted("reduce"))
    monkeypatch.setattr(fsdp_checks.dist, "all_reduce", lambda part, **more: did.append(("sum", part.shape, more)))
    small, large = torch.ones(2).double(), torch.ones(4).double()
    shapes = small.shape, large.shape
    gather = fsdp_checks.WatchedGather(order, "a")
    assert gather(large, small, "group", async_op=True) == "work of gather"  # type: ignore[arg-type]
    (event, replay), real = did
    assert event == A
    assert real == ("gather", shapes[1], small.dtype, [1.0, 1.0], {"group": "group", "async_op": True})
    did.clear()
    replay()
    assert did == [("gather", shapes[1], small.dtype, [0.0, 0.0], {"group": "group"})]
    assert gather.allocate((2, 3), dtype=torch.float64, device=torch.device("cpu")).shape == (2, 3)
    average, total = fsdp_checks.dist.ReduceOp.AVG, fsdp_checks.dist.ReduceOp.SUM
    for op, replicas in ((average, None), (average, "others"), (total, "others"), ("scaled", "others")):
        did.clear()
        reduce = fsdp_checks.WatchedReduce(order, lambda: B, replicas)  # type: ignore[arg-type]
        assert reduce(small, large, "group", op) == "work of reduce"  # type: ignore[arg-type]
        (event, replay), real = did
        assert event == B
        assert real == ("reduce", shapes[0], small.dtype, [1.0] * 4, {"group": "group", "op": op, "async_op": False})
        did.clear()
        replay()
        sums = [("sum", shapes[0], {"group": "others", "op": average if op is average else total})]
        assert did == [
            ("reduce", shapes[0], small.dtype, [0.0] * 4, {"group": "group", "op": op}),
            *(sums if replicas else []),
        ]


class Root(torch.nn.Linear):
    """As FSDP2's modules, which say what they gather and give back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.did: list[str] = []
        self.fails = ""

    def unshard(self) -> None:
        self.did.append("inference" if torch.is_inference_mode_enabled() else "gather")

    def reshard(self) -> None:
        self.did.append("give back")

    def reset_iter_state(self) -> None:
        self.did.append("forget")

    def forward(self, x: Tensor) -> Tensor:
        self.did.append("run")
        if self.fails:
            raise RuntimeError(self.fails)
        return super().forward(x)


def test_nothing_stays_gathered_that_no_backward_pass_gives_back():
    root, x = Root(), torch.ones(1, 2)
    gathers = root.register_forward_pre_hook(lambda *_: root.did.append("FSDP2 gathers"))
    guard = fsdp_checks.ForwardGuard(root, [root])
    guard.give_back()
    assert root.did == []  # nothing has run
    with torch.inference_mode():
        root(x)
        root(x)
    assert root.did == ["gather", "give back", *["FSDP2 gathers", "run", "forget", "give back"] * 2]
    gathers.remove()
    root.did.clear()
    root(x)
    assert root.did == ["run"]  # a backward pass may follow
    with torch.no_grad():
        root(x)
    guard.give_back()
    assert root.did == ["run", "run", *["forget", "give back"] * 2]
    for fails, notes in (("a mistake", 0), ("got a DTensor", 1)):
        root.did.clear()
        root.fails = fails
        with pytest.raises(RuntimeError) as error:
            root(x)
        assert root.did == ["run", "forget", "give back"]
        assert len(getattr(error.value, "__notes__", [])) == notes
    root.fails = ""
    root.did.clear()
    root(x)
    assert root.did == ["run"]
    fresh = Root()
    fsdp_checks.ForwardGuard(fresh, [fresh])
    fresh(x)
    assert fresh.did == ["run"]  # the first pass makes what it gathers into


def test_an_optimizer_is_tried_on_two_rows_for_each_rank(monkeypatch):
    tried: list[tuple[Any, ...]] = []

    def distribute(tensor: Tensor, mesh: Any, specs: list[Any], src_data_rank: Any) -> Any:
        tried.append((tuple(tensor.shape), [str(spec) for spec in specs], src_data_rank))
        part: Any = tensor.clone()
        part.to_local = lambda: part
        return part

    monkeypatch.setattr("torch.distributed.tensor.distribute_tensor", distribute)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    for shape, specs in (((3,), ["S(0)"]), ((5, 3), ["R", "S(0)"])):
        tried.clear()
        mesh: Any = SimpleNamespace(shape=shape, device_type="cpu")
        fsdp_checks.check_optimizer(optimizer, mesh)
        assert tried
        assert all(one == ((6, 4), specs, None) for one in tried)
    tried.clear()
    fsdp_checks.check_optimizer(SimpleNamespace(), mesh)
    assert tried == []
    with pytest.raises(GradientError, match=r"a step of Otherwise on the shards .* \(by 2\)"):
        fsdp_checks.check_optimizer(Otherwise([torch.nn.Parameter(torch.ones(2))], lr=0.1), mesh)


class Otherwise(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(float(hasattr(parameter, "to_local")))


def test_hooks_of_a_parameter_run_on_what_is_gathered_and_later_ones_on_the_shard():
    layer, seen, x = torch.nn.Linear(2, 1), [], torch.ones(1, 2)
    old = {name: torch.nn.Parameter(shard.detach().clone()) for name, shard in layer.named_parameters()}
    old["weight"].flag, old["weight"].kept, layer.weight.kept = "old", "old", "own"  # type: ignore[assignment]
    old["weight"].register_hook(lambda grad: grad * 3)
    old["weight"].register_hook(lambda grad: None)
    old["weight"].register_post_accumulate_grad_hook(seen.append)
    shards = dict(layer.named_parameters())
    members = [fsdp_checks.Member(name, layer, old[name], shard) for name, shard in shards.items()]
    unit = fsdp_checks.Unit(layer, "a", members)
    assert (layer.weight.flag, layer.weight.kept) == ("old", "own")
    for name, value in old.items():  # what FSDP2 does when it gathers
        layer._parameters[name] = torch.nn.Parameter(value.detach().clone())

    def grads(names: list[str]) -> list[float]:
        layer.zero_grad()
        layer(x)  # a pass without a backward pass
        layer(x).sum().backward()
        event = unit.reduction()
        assert (event.text, event.parts) == ("reduces a", sum(1 << [*shards].index(name) for name in names))
        return [getattr(layer, name).grad.flatten()[0].item() for name in names]

    assert grads(["weight", "bias"]) == [3.0, 1.0]
    shards["weight"].register_hook(lambda grad: grad * 5)
    shards["bias"].register_hook(lambda grad: grad * 7)
    assert grads(["weight", "bias"]) == [15.0, 7.0]
    layer.weight.requires_grad_(False)
    assert grads(["bias"]) == [7.0]
    assert seen == []
    (shards["weight"] * 2).sum().backward()
    assert len(seen) == 1
    assert seen[0] is shards["weight"]
    old["weight"].register_post_accumulate_grad_hook(lambda parameter: 1 / 0)
    with pytest.raises(
        GradientError, match=r"a register_post_accumulate_grad_hook of weight failed \(division by zero\)"
    ):
        (shards["weight"] * 2).sum().backward()
    with pytest.raises(GradientError, match="no module '' of the model holds the parameter 'weight'"):
        fsdp_checks.Member("weight", layer, old["weight"], old["weight"])


def test_a_step_more_on_one_rank_is_told(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    run(order, A, B)
    with pytest.raises(GradientError, match="the numbers of optimizer steps differ"):
        order.step()


def test_what_has_a_gradient_is_said_only_where_it_is_not_all():
    names = ("x", "y", "z")
    assert str(Event("reduces a", 0b101, names)) == "reduces a, of these x, z"
    assert str(Event("reduces a", 0b111, names)) == "reduces a"
    assert str(Event("reduces a", 0, names)) == "reduces a"
    assert Event("reduces a", 1, names).code != Event("reduces a", 2, names).code
    assert Event("reduces a", 1, names) == Event("reduces a", 1)


def test_a_gathered_parameter_tells_once_that_it_has_a_gradient():
    layer = torch.nn.Linear(2, 2)
    member = fsdp_checks.Member("weight", layer, layer.weight, layer.weight)
    noted: list[object] = []
    for _ in range(2):  # in forward, and again in backward
        assert member.gathered(noted.append) is layer.weight
    layer(torch.ones(1, 2)).sum().backward()
    assert len(noted) == 1
    layer.weight.requires_grad_(False)
    assert member.gathered(noted.append) is layer.weight
