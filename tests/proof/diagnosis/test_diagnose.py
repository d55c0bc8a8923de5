"""Every cause is named when its mistake is planted, and nothing is said of healthy runs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import nan, sqrt

import pytest
import torch

from colonnade.proof.claims import CAUSES, HYPOTHESES, Claim, hypothesis
from colonnade.proof.compare import Compared, ForwardEvidence, LocalValue, ParameterInfo, Unplaced
from colonnade.proof.diagnose import diagnose
from tests.proof.made_up import World


def times(factor, names=None, ranks=None):
    """Found values of some parameters, on some ranks, multiplied."""

    def change(world, value, name="", rank=0, **_):
        chosen = (names is None or name in names) and (ranks is None or rank in ranks)
        return value * factor if chosen else value

    return change


def over(modes, names=None):
    """Reduced over these modes only."""

    def change(world, value, name, at, rank):
        return world.reduced(name, at, rank, modes) if names is None or name in names else value

    return change


def passes(weights, scale=1.0):
    """The passes of a step with these weights."""

    def change(world, value, name, at, rank):
        some = world.truth_of_passes(name, at)
        return world.cut(name, rank, scale * sum(w * one for w, one in zip(weights, some, strict=True)))

    return change


def sum_over_tensor_instead(world, value, name, at, rank):
    if name != "down.weight":
        return value
    return torch.stack([world.raw_sum(name, at, other) for other in world.group("TENSOR", rank)]).sum(0) / 2


def with_the_next_stage(world, value, name, at, rank):
    """Stage 0 has up.weight where stage 1 has down.weight, of as many elements."""
    if name not in ("up.weight", "down.weight"):
        return value
    other = world.group("PIPELINE", rank)[::-1][world.place(rank)[1]]
    theirs = world.raw_sum("down.weight" if name == "up.weight" else "up.weight", at, other)
    return (world.raw_sum(name, at, rank) + theirs.view(value.shape)) / 2


def nearly_on_rank_1(world, value, rank, **_):
    return value + 1.5e-3 * value.roll(1, 1) if rank == 1 else value


def swapped(world, value, name, rank, at=0, **_):
    if name != "up.weight":
        return value
    other = world.group("TENSOR", rank)[::-1][world.place(rank)[2]]
    return world.cut(name, other, world.truth(name, at))


def dealt(world, value, name, at, rank):
    return world.truth(name, at)[world.place(rank)[2] :: world.tensor] if name == "up.weight" else value


def turned(world, value, name, at, rank):
    return value.T.reshape(value.shape) if name == "down.weight" else value


def one_rank(world, value, name, at, rank):
    return value + 1e-6 if (name, rank) == ("down.weight", 1) else value


def nan_on_rank_1(world, value, name, at, one, rank):
    return value * nan if (name, one, rank) == ("down.weight", 1, 1) else value


def step_before(world, value, name, at, rank):
    return world.cut(name, rank, world.truth(name, at - 1)) if at else value


def one_step_late(world, value, name, at, rank):
    return world.cut(name, rank, world.truth(name, at - 1)) if at else value * 0


def not_cleared(world, value, name, at, rank):
    return value + world.cut(name, rank, world.truth(name, at - 1)) if at else value


def plain_mean(world, value, name, at, rank):
    return world.cut(name, rank, torch.stack([torch.stack(some).mean(0) for some in world.true[at][name]]).mean(0))


def own_clip_first(world, value, name, at, rank, **_):
    total = 0
    for other in world.group("DATA", rank):
        norm = sqrt(sum(float(world.raw_sum(one, at, other).norm()) ** 2 for one in world.parameters))
        total = total + world.raw_sum(name, at, other) * world.coefficient(norm) / world.data
    return total


def of_rank_0(world, value, name, at, rank):
    return world.raw_sum(name, at, 0)


def without_the_next(world, value, name, at, rank):
    others = [other for other in world.group("DATA", rank) if other != (rank + 1) % world.data]
    return torch.stack([world.raw_sum(name, at, other) for other in others]).sum(0) / world.data


def end_not_reduced(world, value, name, at, rank):
    if name != "down.weight":
        return value
    return torch.cat([value.flatten()[:-6], world.raw_sum(name, at, rank).flatten()[-6:]]).view(value.shape)


def without_a_pass_of_rank_1(world, value, name, at, rank):
    return value - world.raw(name, at, 1, 1) / world.data


def largest_of_ranks(world, value, name, at, rank):
    return torch.stack([world.raw_sum(name, at, other) for other in world.group("DATA", rank)]).amax(0)


def each_rank(change):
    """A mean of what `change` makes of each rank's own gradient."""

    def plant(world, value, name, at, rank):
        others = world.group("DATA", rank)
        return torch.stack([change(world.raw_sum(name, at, other)) for other in others]).sum(0) / world.data

    return plant


def larger_half(own):
    return own * (own.abs() >= own.abs().median())


def in_eight_bits(own):
    return (own * 127 / own.abs().max()).round() * own.abs().max() / 127


def late_rank_1(world, value, name, at, rank):
    return value + (world.raw_sum(name, at - 1, 1) - world.raw_sum(name, at, 1)) / world.data if at else value


def step_before_on_top_on_rank_1(world, value, name, at, rank):
    return value + world.raw_sum(name, at - 1, 1) / world.data if at else value


def another_of_rank_1(world, value, name, at, rank):
    if name != "down.weight":
        return value
    sent = world.raw_sum("up.weight", at, 1).reshape(value.shape)
    return value + (sent - world.raw_sum(name, at, 1)) / world.data


def mixed_with_a_turned_one(world, value, name, at, rank):
    """The two weights have as many elements; rank 1 reduces them in the other order."""
    if name not in ("up.weight", "down.weight"):
        return value
    other = "up.weight" if name == "down.weight" else "down.weight"
    own, theirs = world.raw_sum(name, at, rank), world.raw_sum(other, at, 1 - rank).reshape(value.shape)
    return (own + theirs) / world.data


def first_pass_reduced(world, value, name, at, rank):
    first = sum(world.raw(name, at, 0, other) for other in world.group("DATA", rank)) / world.data
    return first + world.raw(name, at, 1, rank)


def some_of_the_weight(world, value, name, at, rank):
    return value + 0.01 * world.cut(name, rank, world.start[name]) if at == 0 else value


def share_of_rank_1_twice(world, value, name, at, one, rank):
    return 2 * value if world.place(rank)[0] == 1 else value


def clipped_after_each_pass(world, value, name, at, rank):
    total = 0
    for other in world.group("DATA", rank):
        kept = dict.fromkeys(world.parameters, 0.0)
        for number in range(world.accumulation):
            kept = {one: kept[one] + world.raw(one, at, number, other) for one in kept}
            share = world.coefficient(sqrt(sum(float(one.norm()) ** 2 for one in kept.values())))
            kept = {one: part * share for one, part in kept.items()}
        total = total + kept[name] / world.data
    return total


def of_its_neighbour(world, value, name, at, rank):
    return world.truth("down.weight", at).reshape(value.shape) if name == "up.weight" else value


def with_its_neighbour(world, value, name, at, rank):
    return value + world.truth("down.weight", at).reshape(value.shape) if name == "up.weight" else value


def each_pass_in_half(world, value, name, at, rank):
    some = [(one, other) for one in range(world.accumulation) for other in world.group("DATA", rank)]
    return sum(world.raw(name, at, one, other).bfloat16().double() for one, other in some) / world.data


def of_own_tokens(world, value, name, at, rank):
    """Half of the tokens on each rank, of which it takes the mean."""
    return value + (0.1 if rank else -0.1) * world.truth(name, at).cos() if name == "down.weight" else value


def without_rank_1(world, value, name, at, rank):
    return value - world.raw_sum(name, at, 1) / world.data if name == "down.weight" else value


def of_own_batch(value):
    return value + 0.1 * value.sin()


def mean_of_own(world, value, name, at, rank):
    own = [of_own_batch(torch.stack(some).mean(0)) for some in world.true[at][name]]
    return world.cut(name, rank, torch.stack(own).mean(0))


def swapped_on_rank_1(world, value, name, at, rank):
    return value * 0.9 if (name, at, rank) == ("up.weight", 1, 1) else value


def own_factor(world, value, name, rank, **_):
    return value * (1.3 + 0.4 * rank) if world.tensor > 1 else value


def only_split(change):
    def plant(world, value, name, rank, **where):
        return change(world, value, name=name, rank=rank, **where) if name.startswith("up.") else value

    return plant


def in_half(world, value, name, **_):
    return value.to(torch.bfloat16).double() if name == "down.weight" else value


def end_not_moved(world, value, before, **_):
    return torch.cat([value.flatten()[:-1], before.flatten()[-1:]]).view(value.shape)


def sine(world, value, name, **_):
    return value.sin() if name == "down.weight" else value


def squares(totals, ranks, names=None):
    return sum(
        float(value.norm()) ** 2
        for name, some in totals.items()
        for rank, value in some.items()
        if rank in ranks and (names is None or name in names)
    )


def norm_over(*modes):
    """Of all that the ranks of some modes hold."""

    def change(world, value, at, rank, totals):
        ranks = {rank}
        for mode in modes:
            ranks = {other for one in ranks for other in world.group(mode, one)}
        return sqrt(squares(totals, ranks))

    return change


def norm_without(*names):
    def change(world, value, at, rank, totals):
        return sqrt(value**2 - sum(float(world.truth(name, at).norm()) ** 2 for name in names))

    return change


def mean_of_norms(world, value, at, rank, totals):
    return sum(sqrt(squares(totals, [other])) for other in world.ranks) / len(world.ranks)


def largest_norm(world, value, at, rank, totals):
    return max(sqrt(squares(totals, [other])) for other in world.ranks)


def rounded_norm(world, value, **_):
    return float(torch.tensor(value).to(torch.bfloat16))


def largest(world, value, at, rank, totals):
    return max(float(world.truth(name, at).abs().max()) for name in world.parameters)


def of_own_stage(world, value, name, at, rank, total):
    mine = [one for one in world.parameters if rank in world.holders(one)]
    norm = sqrt(sum(float(world.reduced(one, at, rank).norm()) ** 2 for one in mine))
    return world.coefficient(norm) * total


def clipped_again(world, value, total, **_):
    return value * float(value.norm() / total.norm())


def start_of_rank_1(world, value, name, rank):
    return value + 0.01 if rank == 1 else value


def only_module(name):
    def change(world, value, rank, at, **where):
        return value + 1e-3 if where["name"] in (name, "down") else value

    return change


def of_own_columns(world, value, name, rank, **_):
    """The tensor ranks have the whole parameter, and the gradients of their own columns only."""
    return value + 0.3 * (1 + world.place(rank)[2]) * value.sin() if name == "down.weight" else value


def other_on_each_rank(world, value, name, at, rank):
    return value * (1 + 0.1 * (1 + rank) * value.sin()) if name == "down.weight" else value


def more(world, value, **_):
    return value + 1


def more_in_step_1(world, value, at, **_):
    return value + at


PLANTED = {
    "summed-not-averaged": [
        (World(2, 1), {"total": times(2)}),
        (World(2, 2, accumulation=2), {"total": times(2)}),
        (World(4, 2), {"total": times(4, ["up.weight"])}),
        (World(1, 4), {"total": times(4, ["down.weight"])}),
    ],
    "wrong-divisor": [
        (World(2, 1), {"total": times(0.5)}),
        (World(3, 2), {"total": times(2 / 3, ["up.weight"])}),
        (World(2, 1), {"raw": times(1.37)}),
        (World(1, 2), {"total": only_split(own_factor)}),
    ],
    "averaged-not-summed": [(World(2, 2), {"total": times(0.5, ["norm.weight"])})],
    "reduced-twice": [
        (World(3, 2), {"total": times(2, ["norm.weight"])}),
        (World(2, 1, accumulation=3), {"total": passes([4, 2, 1])}),
    ],
    "scaled-by-accumulation": [
        (World(2, 1, accumulation=4), {"total": passes([4, 4, 4, 1])}),
        (World(2, 1, accumulation=3), {"total": passes([0.25, 0.25, 0.5])}),
        (World(2, 1, accumulation=3), {"raw": times(3)}),
        (World(2, 2, accumulation=4), {"raw": times(0.25)}),
    ],
    "scaled-by-mode": [
        (World(2, 4), {"raw": times(4)}),
        (World(2, 4, accumulation=2), {"raw": times(0.25)}),
        (World(2, 4), {"raw": times(4, ["down.weight"])}),
    ],
    "loss-scale-left": [
        (World(2, 1), {"total": times(65536.0)}),
        (World(2, 1, max_norm=1.0), {"norm": lambda world, value, **_: 4096 * value}),
    ],
    "not-reduced": [
        (World(2, 1), {"total": over(())}),
        (World(2, 1, accumulation=2), {"total": first_pass_reduced}),
        (World(2, 2), {"total": over(("TENSOR",), ["norm.weight"])}),
        (World(2, 2, 2), {"total": over((), ["up.weight"])}),
        (World(2, 1), {"total": of_rank_0}),
        (World(4, 1), {"total": without_the_next}),
        (World(1, 2), {"total": of_own_tokens}),
        (World(2, 1), {"total": end_not_reduced}),
    ],
    "wrong-operation": [
        (World(2, 1), {"total": largest_of_ranks}),
        (World(4, 1), {"total": each_rank(torch.sign)}),
    ],
    "weights-in-gradient": [(World(2, 1), {"total": some_of_the_weight})],
    "gradients-exchanged": [
        (World(2, 1), {"total": of_its_neighbour}),
        (World(2, 1), {"total": another_of_rank_1}),
        (World(2, 1), {"total": mixed_with_a_turned_one}),
        (World(2, 1), {"total": with_its_neighbour}),
    ],
    "rounded": [
        (World(2, 1), {"total": in_half}),
        (World(2, 1, max_norm=1.0), {"norm": rounded_norm}),
        (World(2, 1), {"total": each_rank(in_eight_bits)}),
        (World(2, 1), {"total": each_rank(lambda own: own.bfloat16().double())}),
        (World(2, 1, accumulation=2), {"total": each_pass_in_half}),
        (World(2, 1), {"activation": nearly_on_rank_1, "recomputed": nearly_on_rank_1, "loss": more}),
    ],
    "backward-differs": [
        (World(2, 1), {"raw": sine}),
        (World(2, 1), {"raw": times(0.3, ["down.weight"])}),
        (World(2, 1), {"raw": times(-1, ["down.weight", "up.bias"])}),
    ],
    "partial-gradient": [
        (World(1, 2), {"raw": of_own_columns}),
        (World(2, 2), {"total": over(("DATA",), ["norm.weight"])}),
    ],
    "tied-copy-missed": [(World(2, 1, 2), {"total": over(("DATA",), ["embed.weight"])})],
    "reduced-over-other-mode": [
        (World(2, 4), {"total": sum_over_tensor_instead}),
        (World(2, 1, 2), {"total": with_the_next_stage}),
    ],
    "replicas-differ": [(World(2, 1), {"total": one_rank})],
    "shards-swapped": [(World(2, 2), {"total": swapped})],
    "shards-interleaved": [(World(1, 2), {"total": dealt})],
    "shard-transposed": [(World(2, 1), {"total": turned})],
    "last-micro-batch-only": [
        (World(2, 1, accumulation=3), {"total": passes([0, 0, 1])}),
        (World(2, 1, accumulation=2), {"total": passes([0, 1], scale=2)}),
    ],
    "micro-batch-missing": [
        (World(2, 1, accumulation=3), {"total": passes([1, 0, 1])}),
        (World(2, 1, accumulation=2), {"total": without_a_pass_of_rank_1}),
    ],
    "micro-batch-twice": [
        (World(2, 1, accumulation=3), {"total": passes([1, 2, 1])}),
    ],
    "own-decision": [
        (World(2, 1), {"total": mean_of_own, "of_data_rank": lambda world, value: of_own_batch(value)}),
    ],
    "changed-between-steps": [
        (World(2, 1), {"started": swapped_on_rank_1, "loss": more_in_step_1}),
        (World(2, 1), {"loss": more_in_step_1}),
    ],
    "rows-differ": [
        (
            World(2, 1),
            {
                "rows": lambda world, value: ("embed", 12, (4, 4)),
                "activation": times(1.1),
                "recomputed": times(1.1),
                "loss": more,
            },
        )
    ],
    "mean-of-means": [(World(2, 1, weights_of_shares=(0.3, 0.7)), {"total": plain_mean})],
    "stale-gradient": [
        (World(2, 1), {"total": step_before}),
        (World(2, 1), {"total": not_cleared}),
        (World(2, 1), {"total": one_step_late}),
        (World(2, 1), {"total": late_rank_1}),
        (World(2, 1), {"total": step_before_on_top_on_rank_1}),
    ],
    "missing-gradient": [
        (World(2, 1), {"total": times(0, ["up.bias"])}),
        (World(3, 1), {"total": each_rank(larger_half)}),
        (World(3, 1), {"total": without_rank_1}),
    ],
    "not-finite": [(World(2, 1, accumulation=2), {"raw": nan_on_rank_1})],
    "clipped-before-reduced": [
        (World(2, 1, max_norm=1.0), {"total": own_clip_first}),
        (World(3, 1), {"total": each_rank(lambda own: own.clamp(-0.3, 0.3))}),
        (World(2, 1, accumulation=3, max_norm=1.0), {"total": clipped_after_each_pass}),
        (World(2, 1, max_norm=1.0), {"total": over(()), "clipped": own_clip_first}),
    ],
    "norm-counts-replicas": [
        (World(2, 1, max_norm=1.0), {"norm": norm_over("DATA")}),
        (World(2, 2, max_norm=1.0), {"norm": norm_over("TENSOR")}),
        (World(1, 1, 2, max_norm=1.0), {"norm": norm_over("PIPELINE")}),
    ],
    "norm-misses-shards": [
        (World(1, 2, max_norm=1.0), {"norm": norm_over()}),
        (World(1, 1, 2, max_norm=1.0), {"norm": largest_norm}),
    ],
    "norm-of-a-part": [
        (World(2, 2, max_norm=1.0), {"norm": norm_without("down.weight")}),
        (World(2, 1, max_norm=1.0), {"norm": lambda world, value, **_: 0.0}),
    ],
    "norms-averaged": [(World(1, 2, max_norm=1.0), {"norm": mean_of_norms})],
    "norm-type-differs": [
        (World(2, 1, max_norm=1.0), {"norm": largest}),
        (World(2, 1, max_norm=1.0), {"norm": lambda world, value, **_: value**2}),
    ],
    "clipped-twice": [(World(2, 1, max_norm=1.0), {"clipped": clipped_again})],
    "clipped-per-stage": [
        (World(2, 1, 2, max_norm=1.0), {"clipped": of_own_stage}),
        (World(2, 1, 2, max_norm=1.0), {"norm": norm_over()}),
    ],
    "not-clipped": [(World(2, 1, max_norm=1.0), {"clipped": lambda world, value, total, **_: total})],
    "not-updated": [
        (World(2, 1), {"weights": end_not_moved}),
        (World(2, 1), {"weights": lambda w, value, name, before, **_: before if name == "up.weight" else value}),
    ],
    "optimizer-differs": [
        (World(2, 1), {"weights": lambda w, value, name, before, **_: before + 3 * (value - before)}),
        (World(2, 1), {"weights": lambda w, value, name, rank, **_: value + 1e-3 * (rank == 1)}),
    ],
    "weights-differ-at-start": [(World(2, 1), {"start": start_of_rank_1})],
    "forward-differs": [
        (
            World(2, 1),
            {"activation": only_module("up"), "recomputed": only_module("up"), "raw": times(1.1), "loss": more},
        )
    ],
    "masks-differ": [
        (World(1, 2), {"masks": lambda world, value: (1,), "activation": only_module("up"), "loss": more})
    ],
    "recomputation-differs": [
        (World(2, 1), {"recomputed": only_module("up"), "raw": times(1.1, ["up.weight"])}),
        (World(2, 1), {"activation": only_module("up"), "raw": times(1.1), "loss": more}),
    ],
    "loss-differs": [(World(2, 1), {"loss": lambda world, value, **_: 2 * value})],
    "buffers-differ": [(World(2, 1), {"buffer": lambda world, value, rank, **_: value + 0.1 * rank})],
    "unknown": [(World(2, 1), {"total": lambda w, value, name, **_: value.sin() if name == "down.weight" else value})],
}


def planted():
    for cause, some in PLANTED.items():
        for at, (world, plant) in enumerate(some):
            yield pytest.param(cause, world, plant, id=f"{cause}-{at}")


def with_plant(world, plant):
    return World(
        world.data,
        world.tensor,
        world.pipeline,
        world.accumulation,
        max_norm=world.max_norm,
        weights_of_shares=world.weights_of_shares,
        plant=plant,
    )


def test_every_cause_has_a_planted_mistake():
    assert set(PLANTED) == set(CAUSES)


@pytest.mark.parametrize(("cause", "world", "plant"), list(planted()))
def test_the_cause_is_named(cause, world, plant):
    report = diagnose(with_plant(world, plant).evidence())
    assert not report.ok
    assert report.causes == [cause], str(report)
    assert report.findings[0].sentence.endswith(".")


def only(report):
    assert len(report.findings) == 1, str(report)
    return report.findings[0]


def test_ranks_that_slice_different_batches_are_named():
    evidence = replace(World(2, 1, plant={"loss": more}).evidence(), sliced_differently=("SEQUENCE",))
    found = only(diagnose(evidence))
    assert found.cause == "replicas-differ"
    assert "SEQUENCE were given different batches" in found.sentence


def test_the_sentence_has_the_ledgers_line_and_the_factor():
    finding = only(diagnose(World(4, 1, plant={"total": times(4)}).evidence()))
    assert "SomeDataHandler" in finding.sentence
    assert finding.factor == 4


def test_a_handler_that_is_right_for_other_parameters_is_not_blamed():
    finding = only(diagnose(World(4, 2, plant={"total": times(4, ["up.weight"])}).evidence()))
    assert "Handler" not in finding.sentence
    assert "which has the same reduction, is right" in finding.sentence
    assert finding.factor == 4
    assert finding.parameters == ("up.weight",)


def test_a_mode_with_the_same_groups_is_offered_if_a_placement_names_it():
    evidence = World(2, 1, plant={"total": times(2)}).evidence()
    groups = {**evidence.groups, "EXPERT": evidence.groups["DATA"]}
    assert "EXPERT" not in only(diagnose(replace(evidence, groups=groups))).sentence
    parameters = {**evidence.parameters, "up.bias": ParameterInfo("Shard(0) on EXPERT")}
    sentences = [
        finding.sentence for finding in diagnose(replace(evidence, groups=groups, parameters=parameters)).findings
    ]
    assert "size of DATA or size of EXPERT" in " ".join(sentences)


def test_an_option_that_differs_between_ranks_is_named_with_them():
    evidence = World(
        2, 1, plant={"weights": lambda w, value, rank, before, **_: value if rank == 0 else before}
    ).evidence()
    step = replace(evidence.steps[0], options={"lr": {0.1: (0,), 0.01: (1,)}})
    assert (
        "lr of the optimizer is 0.1 on rank 0 and 0.01 on rank 1"
        in only(diagnose(replace(evidence, steps=[step]))).sentence
    )


def test_a_scale_of_the_loss_alone_is_a_note_where_nobody_reports_the_loss():
    evidence = World(2, 1, plant={"loss": lambda world, value, **_: 2 * value}).evidence()
    assert diagnose(evidence).causes == ["loss-differs"]
    roots = diagnose(replace(evidence, steps=[replace(step, root_losses=True) for step in evidence.steps]))
    assert roots.ok
    assert "2 times the loss of a single process" in roots.notes[-1]


@pytest.mark.parametrize("differ", [True, False])
def test_replicas_that_differ_after_the_step_are_wrong_whatever_the_single_process_draws(differ):
    plant = {"weights": lambda w, value, rank, name, **_: value + 0.1 * (differ and rank == 1 and name == "up.bias")}
    evidence = World(2, 1, plant=plant).evidence()
    step = evidence.steps[0]
    noisy = {name: replace(entry, spread=float(entry.truth.norm())) for name, entry in step.weights.items()}
    report = diagnose(replace(evidence, steps=[replace(step, weights=noisy)]))
    assert report.causes == (["optimizer-differs"] if differ else [])
    assert not report.ok


def known(value, rank=None):
    return Compared(value, [LocalValue(r, value + (r == rank)) for r in range(2)], 1e-15)


@pytest.mark.parametrize("norm_is_known", [True, False])
def test_the_mistake_is_before_a_module_with_a_wrong_input(norm_is_known):
    value = torch.randn(4, 6, dtype=torch.float64)
    evidence = World(2, 1, plant={"loss": more}).evidence()
    outputs = {"enter": known(value), "head": known(value, 1)}
    forward = ForwardEvidence(
        [("in", "enter"), ("out", "enter"), ("in", "norm"), ("out", "norm"), ("in", "head"), ("out", "head")],
        {"enter": [known(value)], "head": [known(value, 1)], **({"norm": [known(value)]} if norm_is_known else {})},
        {} if norm_is_known else {"norm": Unplaced((4, 3), (4, 6))},
    )
    if norm_is_known:
        outputs = {"enter": outputs["enter"], "norm": known(value), "head": outputs["head"]}
    step = replace(evidence.steps[0], activations=outputs, recomputed={}, forward=forward)
    sentence = only(diagnose(replace(evidence, steps=[step]))).sentence
    last = "norm" if norm_is_known else "enter"
    assert f"the code between the output of module {last} and module head" in sentence
    assert (
        "norm (shape (4, 3) on a rank, (4, 6) in a single process), which could not be compared" in sentence
    ) != norm_is_known


def test_outputs_with_other_positions_are_named():
    evidence = World(2, 1, plant={"loss": more}).evidence()
    tokens = {"words": (8, {0: (0, 1, 6, 7)}), "places": (8, {0: (0, 1, 2, 3)}), "other": (16, {0: (0, 1, 2, 3)})}
    forward = ForwardEvidence(unplaced={"words": Unplaced((3, 4, 8), (3, 8, 8))}, tokens=tokens)
    step = replace(evidence.steps[0], forward=forward)
    sentence = only(diagnose(replace(evidence, steps=[step]))).sentence
    assert "words could not be compared" in sentence
    assert (
        "module words has the positions [0, 1, 6, 7] of a single process, and the output of module places has [0, 1, 2, 3]"
        in sentence
    )


def test_what_the_numbers_cannot_tell_apart_is_named_too():
    finding = only(diagnose(World(2, 2, accumulation=2, plant={"raw": times(2)}).evidence()))
    assert {finding.cause} <= {"scaled-by-accumulation", "scaled-by-mode"}
    assert "scaled-by-accumulation" in finding.sentence + finding.cause
    assert "scaled-by-mode" in finding.sentence + finding.cause
    assert "DATA" in finding.sentence


def test_raw_gradients_tell_a_sum_from_a_scaled_loss():
    in_sum = World(2, 1, accumulation=2, plant={"total": times(2)})
    in_loss = World(3, 1, accumulation=2, plant={"raw": times(2)})
    assert only(diagnose(in_sum.evidence())).cause == "summed-not-averaged"
    assert "accumulation" not in only(diagnose(in_sum.evidence())).sentence
    assert only(diagnose(in_loss.evidence())).cause == "scaled-by-accumulation"


def test_two_mistakes_are_two_findings():
    def both(world, value, name, at, rank):
        if name == "up.weight":
            return world.reduced(name, at, rank, ())
        return value * 2 if name == "down.weight" else value

    report = diagnose(World(2, 1, plant={"total": both}).evidence())
    assert {(f.cause, f.parameters) for f in report.findings} == {
        ("not-reduced", ("up.weight",)),
        ("summed-not-averaged", ("down.weight",)),
    }


def test_the_first_module_that_parts_is_named_and_nothing_that_follows():
    plant = {"activation": only_module("up"), "recomputed": only_module("up"), "total": times(2), "loss": more}
    finding = only(diagnose(World(2, 1, plant=plant).evidence()))
    assert finding.cause == "forward-differs"
    assert finding.parameters == ("up",)


def test_an_activation_that_is_made_good_later_is_no_mistake():
    plant = {"activation": only_module("up"), "recomputed": only_module("up")}
    assert diagnose(World(2, 1, plant=plant).evidence()).ok
    assert only(diagnose(World(2, 1, plant={**plant, "total": times(2)}).evidence())).cause == "summed-not-averaged"


def test_nan_names_the_rank_and_the_micro_batch():
    finding = only(diagnose(World(2, 1, accumulation=2, plant={"raw": nan_on_rank_1}).evidence()))
    assert "rank 1 in micro-batch 1" in finding.sentence


def test_a_loss_that_is_not_finite_is_named_once_and_with_its_ranks():
    plant = {"loss": lambda world, value, rank, **_: nan if rank == 1 else value}
    sentence = only(diagnose(World(2, 1, plant=plant).evidence())).sentence
    assert sentence.startswith("the loss is the first value that is not finite, on rank 1;")


def test_the_sentence_names_the_parameter_the_ranks_the_factor_and_the_mode():
    sentence = only(diagnose(World(2, 1, plant={"total": times(2, ["up.weight"])}).evidence())).sentence
    assert sentence.startswith("the gradient of up.weight on every rank is 2 times what it should be (size of DATA)")
    plant = {"weights": lambda world, value, rank, before, **_: before + (1 + 1e-8 * rank) * (value - before)}
    sentence = only(diagnose(World(2, 1, plant=plant).evidence())).sentence
    assert "on rank 1 was updated by 1.00000001 times the correct step" in sentence
    plant = {"weights": lambda world, value, name, before, **_: before if name == "up.weight" else value}
    sentence = only(diagnose(World(2, 1, plant=plant).evidence())).sentence
    assert sentence.startswith("the weight up.weight on every rank is unchanged by the step; look at")


def test_the_end_of_a_bucket_that_is_not_reduced_is_this_ranks_gradient():
    def end(world, value, name, at, rank):
        own = world.raw_sum(name, at, rank)
        if name == "up.bias":
            return own
        return torch.cat([value.flatten()[:-9], own.flatten()[-9:]]).view(value.shape) if name == "up.weight" else value

    findings = diagnose(World(2, 1, plant={"total": end}).evidence()).findings
    assert [finding.cause for finding in findings] == ["not-reduced"] * len(findings)
    assert all("this rank's local gradient, not reduced over DATA" in finding.sentence for finding in findings)


def test_code_after_right_local_gradients_is_blamed_and_no_handler():
    (finding,) = diagnose(World(2, 1, plant={"total": other_on_each_rank}).evidence()).findings
    assert finding.cause == "replicas-differ"
    assert "although their local gradients are right" in finding.sentence
    assert "ledger" not in finding.sentence


def test_replicas_name_their_ranks():
    finding = only(diagnose(World(3, 1, plant={"total": one_rank}).evidence()))
    assert "ranks [1] are wrong, ranks [0, 2] agree" in finding.sentence


@pytest.mark.parametrize("cause", ["summed-not-averaged", "not-reduced", "last-micro-batch-only", "shards-swapped"])
def test_causes_are_named_in_bf16_too(cause):
    world, plant = PLANTED[cause][0]
    report = diagnose(
        World(world.data, world.tensor, world.pipeline, world.accumulation, plant=plant, dtype="bfloat16").evidence()
    )
    assert report.causes == [cause], str(report)


def test_of_a_large_model_the_first_and_last_layer_are_tested(monkeypatch):
    monkeypatch.setattr("colonnade.proof.diagnose._TESTED_ELEMENTS", 0)
    monkeypatch.setitem(HYPOTHESES, "gradient", list(HYPOTHESES["gradient"]))
    seen = []
    hypothesis("gradient")(lambda case: seen.append(case.name) or ())
    evidence = World(2, 1, plant={"total": times(2)}).evidence()
    names = {name: f"layers.{at}.weight" for at, name in enumerate(evidence.parameters)}
    steps = [
        replace(one, gradients={names[name]: found for name, found in one.gradients.items()}) for one in evidence.steps
    ]
    info = {names[name]: replace(one, placement="") for name, one in evidence.parameters.items()}
    finding = only(diagnose(replace(evidence, steps=steps, parameters=info)))
    assert seen == ["layers.0.weight", "layers.4.weight"]
    assert (finding.cause, len(finding.parameters)) == ("summed-not-averaged", 5)


def test_a_users_hypothesis_is_asked(monkeypatch):
    monkeypatch.setitem(HYPOTHESES, "gradient", list(HYPOTHESES["gradient"]))

    @hypothesis("gradient")
    def is_a_sine(case):
        residual = case.residual(lambda part: case.truth(part).sin())
        yield Claim("sine", "is the sine of itself", "your own handler", residual=residual)

    assert only(diagnose(with_plant(*PLANTED["unknown"][0]).evidence())).cause == "sine"


SIZES = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 1, 2), (2, 1, 2, 3), (2, 2, 2, 1), (4, 1, 1, 4)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_false_alarm_on_healthy_runs(dtype, count):
    draw = random.Random(dtype)
    for seed in range(count):
        sizes = draw.choice(SIZES)
        limit = draw.choice([None, 0.5, 1e6])
        report = diagnose(World(*sizes, dtype=dtype, max_norm=limit, seed=seed).evidence())
        assert report.ok, (sizes, limit, seed, str(report))


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_a_factor_of_1_001_is_far_outside_in_fp64(sizes):
    report = diagnose(World(*sizes, plant={"total": times(1.001)}).evidence())
    assert not report.ok
    assert min(row.error for row in report.rows if row.quantity == "gradient" and row.step == 0) > 1e8
