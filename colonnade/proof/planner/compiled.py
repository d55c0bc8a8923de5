"""A compiled block as a plan runs it: the graphs of AOTAutograd, with pointwise operators and reductions fused into kernels.

AOTAutograd traces the block on fake tensors, with the decompositions of Inductor, and its min-cut partitioner decides which values
are kept for backward: the kept memory is therefore that of torch.compile. Inductor's scheduler needs a GPU and Triton, so its
fusion is imitated: an operator joins the kernel of its last operand if nothing else lies between them, values that only one
kernel needs are not stored, and a cheap value that several kernels need is computed in each. Matrix products, attention and
sorts are kernels of their own. Each kernel reads its operands and writes its results once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colonnade.config.settings import CompileSettings
from colonnade.engine.compile import blocks_of
from colonnade.proof.planner.kernels import Operator, Shaped
from colonnade.proof.planner.planned_passes import signature
from colonnade.proof.planner.recorder import _FLOPS, OperatorRecorder, _is_free, _is_view

_READS_OF_A_CHEAP_VALUE = 4
"""A value with at most so many operands is computed again by each kernel that needs it (Inductor's realize_reads_threshold)."""
_OWN_KERNELS = [
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "sort",
    "topk",
    "embedding_dense_backward",
    "index_put",
    "scatter_add",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
]


class CompiledBlock:
    """The forward pass of a block as compiled code; set as `forward` of the block."""

    def __init__(self, block: nn.Module, recorder: OperatorRecorder, known: dict[Any, Any]) -> None:
        self._block, self._recorder, self._known = block, recorder, known
        self._kind = signature(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._graphs(
            self._block, args, kwargs
        )  # traced before checkpointing hooks into the tensors that autograd saves
        runs = getattr(self._block, "_colonnade_runs", None)
        if runs is None or not torch.is_grad_enabled():
            return self._run(self._block, *args, **kwargs)
        return runs(self._run, self._block, args, kwargs)

    def _run(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held, (forward, backward, out_spec, count) = self._graphs(block, args, kwargs)
        found = _Compiled.apply(self._recorder, forward, backward, count, *held)
        return tree_unflatten(list(found) if isinstance(found, tuple) else [found], out_spec)

    def _graphs(
        self, block: nn.Module, args: Any, kwargs: Any
    ) -> tuple[list[Tensor], tuple[_FusedGraph, _FusedGraph, Any, int]]:
        """The tensors that a call takes, and what was traced for such tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        held = [*given, *block.parameters(), *block.buffers()]
        forms = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in held)
        key = forms, str(spec), self._kind, torch.is_grad_enabled()
        if key not in self._known:
            with self._recorder.paused():
                self._known[key] = self._traced(held, leaves, spec)
        return held, self._known[key]

    def _traced(self, held: list[Tensor], leaves: list[Any], spec: Any) -> tuple[_FusedGraph, _FusedGraph, Any, int]:
        """The fused graphs of forward and backward, the structure of the output, and the number of its tensors."""
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        names = [name for name, _ in (*self._block.named_parameters(), *self._block.named_buffers())]
        count = len(held) - len(names)
        graphs: list[GraphModule] = []
        outputs: list[Any] = []

        def run(*tensors: Tensor) -> Any:
            mine = iter(tensors[:count])
            args, kwargs = tree_unflatten([next(mine) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
            found = functional_call(self._block, dict(zip(names, tensors[count:], strict=True)), args, kwargs)
            flat, out_spec = tree_flatten(found)
            outputs[:] = [out_spec, len(flat)]
            return flat

        def keep(gm: GraphModule, example_inputs: Any) -> Any:
            graphs.append(gm)
            return make_boxed_func(gm.forward)

        table = {op: rule for op, rule in select_decomp_table().items() if "flash_attention_for_cpu" not in str(op)}
        with _bare(self._block):
            traced = aot_function(
                run, fw_compiler=keep, bw_compiler=keep, decompositions=table,
                partition_fn=min_cut_rematerialization_partition,
            )  # fmt: skip
            fresh = [each.detach().requires_grad_(each.requires_grad) for each in held]
            found = [each for each in traced(*fresh) if each.requires_grad]
            torch.autograd.backward(found, [torch.empty_like(each) for each in found])
        forward, backward = graphs
        return _FusedGraph(forward), _FusedGraph(backward), outputs[0], outputs[1]


@contextmanager
def _bare(block: nn.Module) -> Iterator[None]:
    """The block's own forward pass, without compilation and checkpointing."""
    mine, runs = vars(block).pop("forward"), getattr(block, "_colonnade_runs", None)
    if runs is not None:
        block._colonnade_runs = None  # type: ignore[assignment]
    try:
        yield
    finally:
        vars(block)["forward"] = mine
        if runs is not None:
            block._colonnade_runs = runs


def compile_blocks(module: nn.Module, criterion: Any, config: Any, recorder: OperatorRecorder) -> None:
    """Let the blocks run as compiled code that `compile_model` compiles."""
    settings = CompileSettings.read(config.get("compile"))
    if settings is None:
        return
    losses = criterion.modules() if isinstance(criterion, nn.Module) else ()
    built_in = [loss for loss in losses if vars(type(loss)).get("layer_kind") == "cross_entropy"]
    chosen = [loss for loss in built_in if loss.reduction != "mean"]
    known: dict[Any, Any] = {}  # blocks that are alike are traced once
    for block in (*chosen, *(blocks_of(module) if settings.blocks else [module])):
        vars(block)["forward"] = CompiledBlock(block, recorder, known)


class _Compiled(Function):
    """Runs the fused graphs; what the partitioner keeps is saved as autograd saves it, so that hooks see it."""

    @staticmethod
    def forward(
        ctx: Any, recorder: OperatorRecorder, forward: _FusedGraph, backward: _FusedGraph, count: int, *held: Tensor
    ) -> Any:
        found = forward.run(list(held), recorder)
        outputs, kept = found[:count], found[count:]
        ctx.save_for_backward(*[each for each in kept if isinstance(each, Tensor)])
        ctx.others = [each for each in kept if not isinstance(each, Tensor)]
        ctx.recorder, ctx.graph, ctx.wanted = recorder, backward, [each.requires_grad for each in held]
        return tuple(outputs) if count > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [*ctx.others, *ctx.saved_tensors, *gradients]
        found = ctx.graph.run(given, ctx.recorder)
        return None, None, None, None, *found


class _FusedGraph:
    """A graph of AOTAutograd as a sequence of kernels."""

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph.graph
        self._group: dict[Node, int] = {}
        self._form_groups()
        self._stored = self._find_stored()
        self._last = self._last_uses()

    # -- fusion -------------------------------------------------------------------------------------------

    def _form_groups(self) -> None:
        """Number the kernels in the order of the graph; a node joins the kernel of its latest operand or begins one."""
        count, open_groups = 0, set[int]()
        for node in self._graph.nodes:
            if node.op != "call_function" or _passes_on(node):
                continue
            before = [self._group[source] for source in _sources(node) if source in self._group]
            latest = max(before, default=-1)
            alone = _has_own_kernel(node)
            if not alone and latest in open_groups and not _sums_rows(node):
                self._group[node] = latest
                continue
            self._group[node] = count
            if not alone and not _sums_rows(node):
                open_groups.add(count)
            count += 1

    def _find_stored(self) -> set[Node]:
        """Nodes whose values are in memory: results, operands of products, and dear values that several kernels need."""
        stored = set[Node]()
        for node in self._graph.nodes:
            users = [node] if node.op == "output" else [node] if node in self._group else []
            for user in users:
                for source in _sources(user):
                    if source not in self._group:
                        continue
                    same = user in self._group and self._group[user] == self._group[source]
                    opaque = user.op == "output" or _has_own_kernel(user)
                    cheap = len(set(_sources(source))) <= _READS_OF_A_CHEAP_VALUE and _is_pointwise(source)
                    if opaque or _has_own_kernel(source) or (not same and not cheap):
                        stored.add(source)
        return stored

    def _reads(self, node: Node, group: int) -> set[Node]:
        """The stored values that a node reads, through values that its kernel computes itself."""
        found = set[Node]()
        for source in _sources(node):
            if source not in self._group or (source in self._stored and self._group[source] != group):
                found.add(source)
            elif self._group[source] != group:
                found |= self._reads(source, group)
        return found

    def _last_uses(self) -> dict[Node, Node]:
        """The last node that needs the value of each node, with those that are computed from it again."""
        last: dict[Node, Node] = {}
        for node in self._graph.nodes:
            group = self._group.get(node, -1)
            for source in (*node.all_input_nodes, *(self._reads(node, group) if node in self._group else ())):
                last[source] = node
        return last

    # -- running ------------------------------------------------------------------------------------------

    def run(self, given: list[Any], recorder: OperatorRecorder) -> list[Any]:
        """Allocate what the kernels store, count them, and return the outputs."""
        recorder.add_call("compiled call")
        recorder.counts_views = False
        try:
            return self._run(given, recorder)
        finally:
            recorder.counts_views = True

    def _run(self, given: list[Any], recorder: OperatorRecorder) -> list[Any]:
        values: dict[Node, Any] = {}
        places = iter(given)
        given = []
        reads: dict[int, set[Node]] = {}
        writes: dict[int, list[Node]] = {}
        members: dict[int, list[Node]] = {}
        for node, group in self._group.items():
            reads.setdefault(group, set()).update(self._reads(node, group))
            writes.setdefault(group, []).extend([node] if node in self._stored else [])
            members.setdefault(group, []).append(node)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                values[node] = next(places)
            elif node.op == "output":
                return [values[each] if isinstance(each, Node) else each for each in node.args[0]]
            elif node.op == "get_attr":
                values[node] = getattr(node.graph.owning_module, str(node.target))
            elif node in self._group:
                group = self._group[node]
                values[node] = _allocated(node) if node in self._stored else None
                if members[group][-1] is node:
                    self._count(members[group], reads[group], writes[group], recorder)
            else:
                source = node.all_input_nodes[0] if node.all_input_nodes else None
                if source is None or values.get(source) is not None:
                    values[node] = _applied(node, values)
                else:
                    values[node] = None
            for other in node.all_input_nodes:
                if self._last.get(other) is node:
                    values.pop(other, None)
        return []

    def _count(
        self, nodes: Sequence[Node], reads: set[Node], writes: Sequence[Node], recorder: OperatorRecorder
    ) -> None:
        if len(nodes) == 1 and _has_own_kernel(nodes[0]):
            recorder.add(_operator_of(nodes[0]), forward=False, host="compiled kernel")
            return
        if not writes:
            return
        inputs = tuple(each for node in reads for each in _shapes(node))
        outputs = tuple(each for node in writes for each in _shapes(node))
        name = "fused sum of rows" if any(map(_sums_rows, nodes)) else "fused"
        recorder.add(Operator(name, inputs, outputs), forward=False, host="compiled kernel")


def _sources(node: Node) -> list[Node]:
    """The nodes whose values an operator takes, through views; of a tuple, the operator that makes it."""
    found = []
    for each in node.all_input_nodes:
        while each.op == "call_function" and _passes_on(each) and each.all_input_nodes:
            each = each.all_input_nodes[0]
        found.append(each)
    return found


def _passes_on(node: Node) -> bool:
    """Whether a node only gives the memory of its operand another form."""
    if node.target is operator.getitem:
        return True
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return _is_view(target) or _is_free(target)


def _has_own_kernel(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _OWN_KERNELS


def _is_pointwise(node: Node) -> bool:
    """Whether every element of the result depends on one element of each operand."""
    value = node.meta.get("val")
    largest = max((each.numel() for source in node.all_input_nodes for each in _tensors(source)), default=0)
    return isinstance(value, Tensor) and value.numel() >= largest


def _sums_rows(node: Node) -> bool:
    """Whether a node reduces the leading dimensions, as the gradient of a bias does: it needs another order of reading."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._opname not in ("sum", "mean", "amax"):
        return False
    value, source = node.meta.get("val"), next(iter(_tensors(node.all_input_nodes[0])), None)
    if not isinstance(value, Tensor) or source is None or source.dim() < 2:
        return False
    return value.numel() > 1 and value.numel() <= source.numel() // 2 and value.shape[-1:] == source.shape[-1:]


def _tensors(node: Node) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _shapes(node: Node) -> list[Shaped]:
    return [Shaped.of(each) for each in _tensors(node)]


def _allocated(node: Node) -> Any:
    value = node.meta["val"]
    made = [
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) if isinstance(each, Tensor) else each
        for each in (value if isinstance(value, (tuple, list)) else [value])
    ]
    return tuple(made) if isinstance(value, (tuple, list)) else made[0]


def _applied(node: Node, values: dict[Node, Any]) -> Any:
    def of(each: Any) -> Any:
        return values[each] if isinstance(each, Node) else each

    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return target(*torch.fx.map_arg(node.args, of), **torch.fx.map_arg(node.kwargs, of))


def _operator_of(node: Node) -> Operator:
    target: Any = node.target
    values = [node.meta["val"]]
    args = torch.fx.map_arg(node.args, lambda each: each.meta["val"])
    counted = _FLOPS.get(target._overloadpacket)
    flops = int(counted(*args, out_val=values[0])) if counted is not None else 0
    inputs = tuple(each for source in node.all_input_nodes for each in _shapes(source))
    name = target._opname
    if name.startswith("_scaled_dot_product"):
        name = "attention backward" if name.endswith("backward") else "attention"
        causal = any(each is True for each in node.args) or node.kwargs.get("is_causal")
        name = f"{name}, causal" if causal else name
        if name.startswith("attention backward"):  # gradient, q, k, v, output ... as `KernelTimes` has them
            inputs = (inputs[0], inputs[4], *inputs[1:4])
    return Operator(name, inputs, tuple(_shapes(node)), flops)
