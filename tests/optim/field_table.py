"""The test matrix of gradient clipping: 37 failures reported in other systems, and the check that detects each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.optim import field_engines, field_torch, field_values
from tests.optim.field_facts import Fact
from tests.sources import linked

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
        "expert gradients were not all-reduced over their replicas; each rank clipped by its own norm",
        "experts with expert 2 in data 4, including the expert-data group",
        ("expert 2 in data 4",),
    ),
    Row(
        2,
        "Megatron-LM #785",
        "dense parameters and experts were clipped by separate norms, so the result depended on the expert size",
        "the same gradient has the same norm under expert 1, 2 and 4",
        ("no experts in data 4", "expert 2 in data 4", "expert 4 in data 4"),
    ),
    Row(
        3,
        "Megatron-LM #5916, #6080, #6099",
        "with tensor parallelism, experts were dropped as duplicates of the dense tensor group; master copies lost the attribute",
        "experts over data x tensor, with biases; fp64 copies of bf16 parameters",
        ("expert 2 over data 2 x tensor 2", "experts cut over expert and tensor"),
        (field_engines.master_copies,),
        4,
    ),
    Row(
        4,
        "Megatron-LM #7452",
        "a plain parameter sharded by heads had no attribute, and only the first rank counted it",
        "sharded by hand: right with a placement; without one, uneven shards raise an error with the name",
        ("tensor 2, uneven heads",),
        (field_engines.unplaced_shard,),
        2,
    ),
    Row(
        5,
        "ROCm/TransformerEngine #715",
        "replicated weights were marked as sharded: norm up to 1.5 times too large at tensor 8",
        "replicas of all sizes inside tensor 8",
        ("tensor 8",),
    ),
    Row(
        6,
        "NeMo-RL #3788, hyper-parallel #526, LBANN #2376",
        "one all-reduce over the tensor group for all parameters: replicas were counted once per rank",
        "a LayerNorm and sharded linear layers",
        ("tensor 2", "data 2 x tensor 2"),
    ),
    Row(
        7,
        "Megatron-LM #7227",
        "the tied output weight of the last stage was counted again: 40 instead of 28.28",
        "tied weights at 2 of 2 and at 2 of 4 stages",
        ("pipeline 2, tied", "pipeline 4, tied at 1 and 3, data 2"),
    ),
    Row(
        8,
        "DeepSpeed #1252",
        "the same under ZeRO",
        "a tied weight in uneven flat shards over data",
        ("pipeline 2 x data 2, tied, flat shards",),
    ),
    Row(
        9,
        "torchtitan #596, #649",
        "every stage, or every model part, was clipped by its own norm",
        "two chunks on each of two stages, in one call and one collective",
        ("pipeline 2, two chunks each",),
    ),
    Row(
        10,
        "DeepSpeed #5411",
        "a flat buffer of sharded and replicated parameters was counted as one kind: wrong by the root of the tensor size",
        "one flat bucket with parameters of 2 and of 4 holders",
        (),
        (field_engines.one_bucket_of_several_placements,),
        4,
    ),
    Row(
        11,
        "DeepSpeed #5242, #5347, #7188, #7371",
        "a NaN was encoded as -1 and summed: users saw a norm of 1.4142",
        "one NaN or inf on one rank: all ranks get it as the norm, for its group too, and skip the step",
        (),
        (field_values.one_bad_element,),
        2,
    ),
    Row(
        12,
        "DeepSpeed #8469, #8475",
        "the norms of ranks were averaged: 7.236 instead of 10.954",
        "experts split 2 + 1 and 3 + 0",
        ("experts 2 + 1", "experts 3 + 0"),
    ),
    Row(
        13,
        "DeepSpeed #8613",
        "the norm of experts was discarded in fp16: 6 instead of 10",
        "experts split 3 + 0 in fp16",
        ("experts 3 + 0, fp16",),
    ),
    Row(
        14,
        "DeepSpeed #5150",
        "a right coefficient was applied wrongly",
        "plain SGD, and a custom optimizer, move the weights by exactly the limit",
        ("one rank", "data 2", "data 8"),
        (field_engines.own_optimizer,),
        2,
    ),
    Row(
        15,
        "DeepSpeed #3166",
        "clipping was silently disabled in bf16",
        "the length of the step in fp64, fp32, bf16 and fp16",
        (),
        (field_values.every_dtype,),
        2,
    ),
    Row(
        16,
        "DeepSpeed #5145, #3564, #7409, torchtitan #1541, Megatron-LM #5530, AReaL #1139",
        "a rank without gradients crashed, or skipped the collective while the others waited",
        "empty lists, idle and frozen stages, unused parameters, empty shards",
        ("pipeline 2, an idle stage", "pipeline 2, a frozen stage", "silent and frozen", "flat shards over data 4"),
        (field_values.nothing_to_count,),
        4,
    ),
    Row(
        17,
        "DeepSpeed #5256, #5461",
        "norms of offloaded gradients were stacked with norms on the GPU",
        "gradients on two devices in one call (on a machine with a GPU)",
        (),
        (field_values.mixed_devices,),
        2,
        needs_cuda=True,
    ),
    Row(
        18,
        "DeepSpeed #7967, #7302, ColossalAI #3559, #4610, #6102, Apex #1512",
        "the norm of only one micro-batch, or of gradients times the loss scale",
        "three micro-batches with an unused parameter; a loss scale of 1024",
        (),
        (field_engines.three_micro_batches, field_engines.loss_scale),
        2,
    ),
    Row(
        19,
        "VeOmni #184, RLinf #1558, torch #88955",
        "hybrid shards were summed over their replicas too, or not at all",
        "DTensors on 2 x 2 ranks: hybrid, full and no shard; FSDP2 on that mesh under an engine",
        ("HSDP 2 x 2 beside no shard",),
        (field_torch.hybrid_shards,),
        4,
    ),
    Row(
        20,
        "NeMo Automodel #3816",
        "plain expert tensors were in no mesh: every expert group used its own norm, 40.2 instead of 4.02",
        "plain experts together with DTensors, and with FSDP2",
        ("FSDP dense beside plain experts",),
        (field_torch.plain_experts_beside_fsdp,),
        4,
    ),
    Row(
        21,
        "torch #180346, transformers #36132, accelerate #4219, torchtune #2420",
        "DTensors of several meshes, or together with plain tensors, raise an error",
        "three meshes and plain tensors, with and without a launched context; FSDP2 with a TP plan",
        ("DTensors on three meshes beside plain", "DTensors on three meshes beside replicas"),
        (field_torch.meshes_without_context, field_torch.fsdp_over_tensor_without_context),
        4,
    ),
    Row(
        22,
        "torch #149768",
        "the 1e-6 of the coefficient was added once per shard",
        "gradients of 1e-6 in 8 shards, clipped bit-exactly as in a single process",
        ("tiny, in 8 shards",),
    ),
    Row(
        23,
        "torch #170862, torchtitan #766, miles #35, LlamaFactory #10640",
        "the returned norm was partial, and read as the local value",
        "every norm is a plain tensor with the same bits on all ranks, for p = inf too; pending reductions raise an error or are completed",
        ("DTensor of 3 elements over 4",),
        (field_torch.sums_that_are_pending,),
        2,
    ),
    Row(
        24,
        "torchtitan #4135, torch #194033, fairscale #263, #1092, burn #5699",
        "the norm was rounded to, or overflowed in, the half precision of the gradients",
        "bf16 and fp16 gradients of size 300, all p, to 1e-6 of fp64",
        ("halves beyond their squares",),
    ),
    Row(
        25,
        "Megatron-LM #3746, #4802, #7279",
        "lists of mixed dtypes were misread; the norm was not that of the optimizer's gradient",
        "bf16, fp16 and fp32 in one list; the optimizer uses the measured gradient",
        ("mixed dtypes",),
    ),
    Row(
        26,
        "Megatron-LM MIMO",
        "the norm was summed over a group without tensor, pipeline and expert shards",
        "all of them at once on 8 ranks; at start-up, elements that no rank stores raise an error that names them",
        ("data 2 x pipeline 2 x tensor 2, experts",),
        (field_engines.uncovered,),
        4,
    ),
    Row(
        27,
        "transformers #46113",
        "gradients were passed in place of parameters: right norm, nothing clipped; all gradients were gathered on every rank",
        "gradients as arguments give 0; no allocation reaches 1/8 of the gradients' size, no gradient is kept",
        ("data 2",),
        (field_values.gradients_for_parameters, field_values.nothing_large_allocated, field_engines.nothing_kept),
        2,
    ),
    Row(
        28,
        "torchtitan #1258, PixArt #160",
        "the norm consumed a generator of parameters: nothing was clipped",
        "every call in this table receives an iterator",
        ("one rank", "tensor 2"),
    ),
    Row(
        29,
        "torch #46849, #60691, #94060",
        "non-finite norms passed silently; the host read values; a fused optimizer scaled twice",
        "`error_if_nonfinite` raises on all ranks; fused SGD, AdamW and Adagrad compared with torch's clipping, without reads on the host",
        (),
        (field_values.raised_everywhere, field_engines.fused_once),
        2,
    ),
    Row(
        30,
        "torch FSDP1",
        "the maximum of a step remained in a cached zero: 100 in every later step",
        "100, then 1, then 3, with a rank without elements",
        (),
        (field_values.large_then_small,),
        2,
    ),
    Row(
        31,
        "torch DTensor",
        "the maximum of an empty shard raises an error only on its rank",
        "3 elements over 4 ranks, as DTensor and as flat shards",
        ("DTensor of 3 elements over 4", "flat shards over data 4"),
    ),
    Row(
        32,
        "gloo",
        "a MAX over ranks keeps or drops a NaN, depending on their order",
        "a NaN on each rank in turn, p = 2 and inf",
        (),
        (field_values.bad_on_each_rank,),
        4,
    ),
    Row(
        33,
        "torch on a CPU",
        "fp32 squares were summed one by one: 0.8% wrong for 50 million values",
        "6 million equal values to 1e-6 (50 million in tests/optim/test_norm.py)",
        (),
        (field_values.many_equal_values,),
        2,
    ),
    Row(
        34,
        "Megatron-LM #5394, DeepSpeed #7776, #8439",
        "orthogonalized updates were clipped like gradients: pushed below a floor, or divided by their own norm",
        "one group neither counted nor clipped, one only counted",
        (),
        (field_engines.groups_apart,),
        2,
    ),
    Row(
        35,
        "Megatron-LM #5889, #7507",
        "the norm was read on the host during a step, which prevents CUDA graphs",
        "no host read in clipping and step of flat and fused optimizers (graphs in tests/optim/test_cuda.py)",
        ("tensor 2", "data 8"),
        (field_engines.fused_once,),
        2,
    ),
    Row(
        36,
        "DeepSpeed #7985, #8154, torchtitan #4054, Megatron-LM #673",
        "clipping rescaled gradients with wrong divisors, which hid the error",
        "each gradient compared with a single process, with and without clipping",
        (),
        (field_engines.gradients_without_clipping,),
        4,
    ),
    Row(
        37,
        "ColossalAI, DeepSpeed, torchtitan, Megatron-LM (found in the code)",
        "norms of groups were added linearly; weights were measured instead of gradients; one stage raised while others waited; "
        "only ranks with parameters of a group entered its collective; the p-th root of squares",
        "experts with dense parameters for all p; weights of 1e9; errors on all ranks; groups without parameters on a stage",
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
    """The table of docs/evidence/clipping.md."""
    lines = ["| # | reported in | failure | check |", "|---|---|---|---|"]
    lines += [f"| {row.number} | {linked(row.seen_in)} | {row.bug} | {row.check} |" for row in ROWS]
    return "\n".join(lines) + "\n"


def checks_of_world(world: int) -> list[Check]:
    """The checks that run on so many ranks of a CPU, each once."""
    chosen = [row for row in ROWS if row.world == world and not row.needs_cuda]
    return list(dict.fromkeys(check for row in chosen for check in row.checks))


if __name__ == "__main__":
    print(markdown(), end="")
