"""The test matrix of gradient clipping: 37 ways it went wrong in the field, and the check that finds each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.optim import field_engines, field_torch, field_values
from tests.optim.field_facts import Fact

Check = Callable[[], list[Fact]]


@dataclass(frozen=True)
class Row:
    """One kind of failure: where it was met, what went wrong, how it is checked here.

    `cases` are layouts of `field_layouts.CASES`, surveyed whole. `checks` run on `world` ranks besides.
    `needs_cuda`: the check says nothing on a machine without a GPU.
    """

    number: int
    seen_in: str
    bug: str
    check: str
    cases: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    world: int = 0
    needs_cuda: bool = False


ROWS: tuple[Row, ...] = (
    Row(
        1,
        "ColossalAI #2192",
        "expert gradients were never summed over their replicas; each rank clipped by a norm of its own",
        "experts over expert 2 in data 4, with their data twin",
        ("expert 2 in data 4",),
    ),
    Row(
        2,
        "Megatron-LM #785",
        "dense and expert parts clipped by separate norms, so that the result depended on the expert size",
        "the same gradient under expert 1, 2 and 4 has the same norm",
        ("no experts in data 4", "expert 2 in data 4", "expert 4 in data 4"),
    ),
    Row(
        3,
        "Megatron-LM #5916, #6080, #6099",
        "experts beside tensor parallelism dropped as duplicates of the dense tensor group; the mark lost on master copies",
        "experts over data x tensor, with biases; fp64 copies of bf16 parameters",
        ("expert 2 over data 2 x tensor 2", "experts cut over expert and tensor"),
        (field_engines.master_copies,),
        4,
    ),
    Row(
        4,
        "Megatron-LM #7452",
        "a bare parameter split by heads carried no mark and was left out on all ranks but the first",
        "split by hand: right with a placement, refused by name without one where the parts are uneven",
        ("tensor 2, uneven heads",),
        (field_engines.unplaced_shard,),
        2,
    ),
    Row(
        5,
        "ROCm/TransformerEngine #715",
        "replicated weights marked as split: norm up to 1.5 times too large at tensor 8",
        "replicas of all sizes inside tensor 8",
        ("tensor 8",),
    ),
    Row(
        6,
        "NeMo-RL #3788, hyper-parallel #526, LBANN #2376",
        "one sum over the tensor group for everything: replicas counted once per rank",
        "norm layer beside split linear layers",
        ("tensor 2", "data 2 x tensor 2"),
    ),
    Row(
        7,
        "Megatron-LM #7227",
        "the tied output weight of the last stage counted again: 40 for 28.28",
        "tied weights at 2 of 2 and at 2 of 4 stages",
        ("pipeline 2, tied", "pipeline 4, tied at 1 and 3, data 2"),
    ),
    Row(
        8,
        "DeepSpeed #1252",
        "the same under ZeRO",
        "a tied weight cut into uneven flat shards over data",
        ("pipeline 2 x data 2, tied, flat shards",),
    ),
    Row(
        9,
        "torchtitan #596, #649",
        "every stage, or every model part, clipped by its own norm",
        "two chunks on each of two stages, in one call and one collective",
        ("pipeline 2, two chunks each",),
    ),
    Row(
        10,
        "DeepSpeed #5411",
        "a flat buffer of split and replicated parameters counted as one kind: off by the root of the tensor size",
        "one flat bucket holding parameters of 2 and of 4 holders",
        (),
        (field_engines.one_bucket_of_several_placements,),
        4,
    ),
    Row(
        11,
        "DeepSpeed #5242, #5347, #7188, #7371",
        "a NaN encoded as -1 and added up: users saw a norm of 1.4142",
        "one NaN or inf on one rank: that is the norm on all, of its group too, and the step is dropped",
        (),
        (field_values.one_bad_element,),
        2,
    ),
    Row(
        12,
        "DeepSpeed #8469, #8475",
        "the norms of ranks averaged: 7.236 for 10.954",
        "experts split 2 + 1 and 3 + 0",
        ("experts 2 + 1", "experts 3 + 0"),
    ),
    Row(
        13,
        "DeepSpeed #8613",
        "the expert half of the norm thrown away in fp16: 6 for 10",
        "experts split 3 + 0 in fp16",
        ("experts 3 + 0, fp16",),
    ),
    Row(
        14,
        "DeepSpeed #5150",
        "a right coefficient, wrongly applied",
        "plain SGD moves the weights by a step of just the limit's length; so does an optimizer of one's own",
        ("one rank", "data 2", "data 8"),
        (field_engines.own_optimizer,),
        2,
    ),
    Row(
        15,
        "DeepSpeed #3166",
        "clipping silently off in bf16",
        "the length of the step in fp64, fp32, bf16 and fp16",
        (),
        (field_values.every_dtype,),
        2,
    ),
    Row(
        16,
        "DeepSpeed #5145, #3564, #7409, torchtitan #1541, Megatron-LM #5530, AReaL #1139",
        "a rank with nothing to count crashed, or skipped the collective and left the others waiting",
        "empty lists, idle and frozen stages, unused parameters, empty shards",
        ("pipeline 2, an idle stage", "pipeline 2, a frozen stage", "silent and frozen", "flat shards over data 4"),
        (field_values.nothing_to_count,),
        4,
    ),
    Row(
        17,
        "DeepSpeed #5256, #5461",
        "norms of offloaded gradients stacked with those on the GPU",
        "gradients on two devices in one call (on a machine with a GPU)",
        (),
        (field_values.mixed_devices,),
        2,
        needs_cuda=True,
    ),
    Row(
        18,
        "DeepSpeed #7967, #7302, ColossalAI #3559, #4610, #6102, Apex #1512",
        "the norm of one micro-batch only, or of gradients times the loss scale",
        "three micro-batches with an unused parameter; a loss scale of 1024",
        (),
        (field_engines.three_micro_batches, field_engines.loss_scale),
        2,
    ),
    Row(
        19,
        "VeOmni #184, RLinf #1558, torch #88955",
        "hybrid shards summed over their replicas too, or over nobody",
        "DTensors on 2 x 2 ranks: hybrid, full and no shard; FSDP2 on that mesh under an engine",
        ("HSDP 2 x 2 beside no shard",),
        (field_torch.hybrid_shards,),
        4,
    ),
    Row(
        20,
        "NeMo Automodel #3816",
        "plain expert tensors unknown to any mesh: every expert group its own norm, 40.2 for 4.02",
        "plain experts beside DTensors, and beside what FSDP2 makes",
        ("FSDP dense beside plain experts",),
        (field_torch.plain_experts_beside_fsdp,),
        4,
    ),
    Row(
        21,
        "torch #180346, transformers #36132, accelerate #4219, torchtune #2420",
        "DTensors of several meshes, or beside plain tensors, raise",
        "three meshes beside plain tensors, with and without a launched context; FSDP2 over a tensor plan",
        ("DTensors on three meshes beside plain", "DTensors on three meshes beside replicas"),
        (field_torch.meshes_without_context, field_torch.fsdp_over_tensor_without_context),
        4,
    ),
    Row(
        22,
        "torch #149768",
        "the 1e-6 of the coefficient added once per shard",
        "gradients of 1e-6 in 8 shards, clipped to the last digit as in one process",
        ("tiny, in 8 shards",),
    ),
    Row(
        23,
        "torch #170862, torchtitan #766, miles #35, LlamaFactory #10640",
        "the norm returned was a part that reads as the local value",
        "every norm is a plain tensor with the same bits everywhere, p = inf included; pending sums are refused or finished",
        ("DTensor of 3 elements over 4",),
        (field_torch.sums_that_are_pending,),
        2,
    ),
    Row(
        24,
        "torchtitan #4135, torch #194033, fairscale #263, #1092, burn #5699",
        "the norm rounded to, or overflowing in, the gradients' half precision",
        "bf16 and fp16 gradients of size 300, all orders, to 1e-6 of fp64",
        ("halves beyond their squares",),
    ),
    Row(
        25,
        "Megatron-LM #3746, #4802, #7279",
        "lists of mixed dtypes misread; the norm of another gradient than the optimizer used",
        "bf16, fp16 and fp32 in one list; the step taken is the gradient measured",
        ("mixed dtypes",),
    ),
    Row(
        26,
        "Megatron-LM MIMO",
        "the norm summed over a group that left out tensor, pipeline and expert shards",
        "all of them at once on 8 ranks; at start-up, elements that nobody holds are an error that names them",
        ("data 2 x pipeline 2 x tensor 2, experts",),
        (field_engines.uncovered,),
        4,
    ),
    Row(
        27,
        "transformers #46113",
        "gradients handed over for parameters: a right norm and nothing clipped; all gradients gathered on every rank",
        "handed-over gradients give 0; nothing of even 1/8 of the gradients' size is allocated, no gradient is kept",
        ("data 2",),
        (field_values.gradients_for_parameters, field_values.nothing_large_allocated, field_engines.nothing_kept),
        2,
    ),
    Row(
        28,
        "torchtitan #1258, PixArt #160",
        "a generator of parameters used up by the norm: nothing clipped",
        "every call in this table is given an iterator",
        ("one rank", "tensor 2"),
    ),
    Row(
        29,
        "torch #46849, #60691, #94060",
        "non-finite norms pass silently; host reads; a fused optimizer scales twice",
        "`error_if_nonfinite` raises on all ranks; fused SGD, AdamW and Adagrad beside torch's clip, nothing read on the host",
        (),
        (field_values.raised_everywhere, field_engines.fused_once),
        2,
    ),
    Row(
        30,
        "torch FSDP1",
        "the maximum of a step stayed in a cached zero: 100, and 100 ever after",
        "100, then 1, then 3, with a rank that holds nothing",
        (),
        (field_values.large_then_small,),
        2,
    ),
    Row(
        31,
        "torch DTensor",
        "the maximum of an empty shard raises on its rank alone",
        "3 elements over 4 ranks, as DTensor and as flat shards",
        ("DTensor of 3 elements over 4", "flat shards over data 4"),
    ),
    Row(
        32,
        "gloo",
        "a MAX over ranks keeps or drops a NaN by their order",
        "a NaN on each rank in turn, p = 2 and inf",
        (),
        (field_values.bad_on_each_rank,),
        4,
    ),
    Row(
        33,
        "torch on a CPU",
        "fp32 squares added up one by one: 0.8% off on 50 million values",
        "6 million equal values to 1e-6 (50 million in tests/optim/test_norm.py)",
        (),
        (field_values.many_equal_values,),
        2,
    ),
    Row(
        34,
        "Megatron-LM #5394, DeepSpeed #7776, #8439",
        "orthogonalised updates clipped like others: thrown under a floor, or divided by their own norm",
        "one group neither counted nor clipped, one counted only",
        (),
        (field_engines.groups_apart,),
        2,
    ),
    Row(
        35,
        "Megatron-LM #5889, #7507",
        "the norm read on the host in the middle of a step: no CUDA graph",
        "no host read in clip and step of flat and fused optimizers (graphs in tests/optim/test_cuda.py)",
        ("tensor 2", "data 8"),
        (field_engines.fused_once,),
        2,
    ),
    Row(
        36,
        "DeepSpeed #7985, #8154, torchtitan #4054, Megatron-LM #673",
        "wrong divisors that clipping hid, because it scales them away",
        "each gradient against one process with clipping off, and on",
        (),
        (field_engines.gradients_without_clipping,),
        4,
    ),
    Row(
        37,
        "ColossalAI, DeepSpeed, torchtitan, Megatron-LM, by reading",
        "norms of groups added linearly; weights measured for gradients; one stage raises and the rest wait; "
        "a group's collective entered only by who has parameters of it; squares under a p-th root",
        "experts beside dense in all orders; weights of 1e9; raising on all ranks; groups that a stage has no part of",
        ("experts 2 + 1", "pipeline 2, tied"),
        (
            field_values.weights_do_not_count,
            field_values.raised_everywhere,
            field_engines.group_without_parameters_here,
        ),
        2,
    ),
)


def markdown() -> str:
    """The table, as it stands in docs/reference/clipping.md."""
    lines = ["| # | seen in | what went wrong | how it is checked here |", "|---|---|---|---|"]
    lines += [f"| {row.number} | {row.seen_in} | {row.bug} | {row.check} |" for row in ROWS]
    return "\n".join(lines) + "\n"


def checks_of_world(world: int) -> list[Check]:
    """The checks that run on so many ranks of a CPU, each once."""
    chosen = [row for row in ROWS if row.world == world and not row.needs_cuda]
    return list(dict.fromkeys(check for row in chosen for check in row.checks))


if __name__ == "__main__":
    print(markdown(), end="")
