"""Defaults of public functions and classes: a default that changes is a decision, because the runs of users change with it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

DEFAULTS = """
_launch.launch: verbose=True
checkpoint.export.import_checkpoint: step=0 trust=False
checkpoint.manager.CheckpointManager: keep=3 background=False verify=True read_only=False
checkpoint.storage.verify: content=True
context.parallel_context.ParallelContext.is_pipeline_first_stage: ignore_virtual=False
context.parallel_context.ParallelContext.is_pipeline_last_stage: ignore_virtual=False
context.dist_group_initializer.Initializer_1D: sequence_split=False
engine.build.initialize: verbose=True
engine.engine.Engine.train: mode=True
engine.engine.Engine.memory: reset=False
engine.precision.Precision: master_weights=True
engine.schedule.schedules.BaseSchedule.forward_back_step: forward_only=False return_loss=True return_output_label=True
engine.schedule.schedules.NonPipelineSchedule.forward_back_step: forward_only=False return_loss=True return_output_label=True
engine.schedule.schedules.PipelineSchedule.forward_back_step: forward_only=False return_loss=True return_output_label=True
engine.schedule.schedules.BaseSchedule.load_batch: to_gpu=True
engine.schedule.schedules.PipelineSchedule: loss_everywhere=True
nn.layer.arrangement.Arrangement: sequence_split=False
nn.layer.arrangement.gather_output: side='outer' sequence=-2 hidden=-1 unit=1
nn.layer.arrangement.partition_input: side='outer' sequence=-2 hidden=-1 unit=1
nn.layer.attention.SelfAttention: causal=False balanced=False dropout=0.0 bias=True
nn.layer.attention.SelfAttention.from_module: causal=False
nn.layer.dropout.Dropout: p=0.5 inplace=False
nn.layer.linear.Classifier: bias=False
nn.layer.linear.Linear: bias=True gather_output=False input_is_parallel=True parts=1 unit=1
nn.layer.linear.Linear.from_module: parts=1
nn.layer.linear.Linear.forward: each=False
nn.layer.linear.MLP: gated=False bias=True
nn.layer.cross_entropy.LinearCrossEntropyLoss: ignore_index=-100 label_smoothing=0.0
nn.layer.cross_entropy.CrossEntropyLoss: ignore_index=-100 label_smoothing=0.0
nn.layer.layer_norm.LayerNorm: eps=1e-05 bias=True
nn.layer.attention.Rotary: theta=10000.0 length=0
nn.lr_scheduler.CosineAnnealingLR: eta_min=0.0 warmup_steps=0 last_epoch=-1
nn.lr_scheduler.CosineAnnealingWarmupLR: warmup_steps=0 eta_min=0.0 last_epoch=-1
nn.lr_scheduler.LinearWarmupLR: warmup_steps=0 last_epoch=-1
nn.lr_scheduler.MultiStepWarmupLR: warmup_steps=0 gamma=0.1 last_epoch=-1
nn.lr_scheduler.PolynomialWarmupLR: warmup_steps=0 end=0.0 power=1.0 last_epoch=-1
nn.layer.cross_entropy.Accuracy: ignore_index=-100
nn.moe.experts.Experts: gated=False bias=True
nn.moe.moe_layer.MoE: gated=False bias=True
nn.moe.router.TopKRouter: k=2 normalize=True scale=1.0 groups=1 top_groups=1 balance_loss=0.01 z_loss=0.0 bias_rate=0.0 noise=0.0
nn.sequence.parts.Parts: balanced=False
nn.sequence.parts.Parts.of: balanced=False
nn.sequence.parts.split_sequence: dim=1 balanced=False
nn.sequence.parts.gather_sequence: dim=1 balanced=False
nn.sequence.parts.sequence_positions: balanced=False
nn.sequence.ring.ring_attention: causal=False dropout=0.0 balanced=False
nn.sequence.ulysses.ulysses_attention: causal=False dropout=0.0
optim.clip.grad_norm: norm_type=2.0 error_if_nonfinite=False
optim.clip.AdaGC: factor=1.05 beta=0.98 warmup=100 max_norm=1.0
optim.clip.PercentileClip: percentile=10.0 window=1000
optim.clip.SkipOnSpike: sigmas=6.0 window=128 bound=inf max_norm=inf
optim.clip.ZClip: z_max=2.5 alpha=0.97 warmup=25 max_norm=inf
optim.zero.zero_optimizer.ZeroOptimizer.zero_grad: set_to_none=True
parallel.collectives.all_gather: dim=0
parallel.collectives.reduce_scatter: dim=0
parallel.collectives.gather: dim=-1
parallel.collectives.scatter: dim=-1
parallel.collectives.ring: shift=1
parallel.collectives.split_sizes: unit=1
parallel.placement.Replicate: owes='auto'
parallel.placement.Shard: owes='auto'
parallel.split.Chunks.load_state_dict: strict=True assign=False
parallel.split.Chunks.named_modules: prefix='' remove_duplicate=True
parallel.split.Chunks.state_dict: prefix='' keep_vars=False
trainer.hooks.checkpoint_hooks.EMAHook: decay=0.999 interval=1 warm_up=True evaluate=True priority=50
trainer.hooks.hook.BaseHook: priority=10
trainer.hooks.checkpoint_hooks.LoadCheckpointHook: required=False priority=-100
trainer.hooks.checkpoint_hooks.SaveCheckpointHook: interval=1 by_epoch=True priority=100 keep=3 background=False
trainer.hooks.metric_hooks.EvaluateHook: priority=90
trainer.hooks.metric_hooks.AccuracyHook: priority=0
trainer.hooks.metric_hooks.GradientNormHook: interval=1 priority=10
trainer.hooks.metric_hooks.LRSchedulerHook: store_lr_in_state=True priority=1
trainer.hooks.metric_hooks.LossHook: priority=0
trainer.hooks.metric_hooks.MetricHook: priority=0
trainer.hooks.metric_hooks.ThroughputHook: ignored_steps=0 tflop_per_step=0.0 priority=2
trainer.hooks.profiler.ProfilerHook: steps=3 skip=5 memory=False priority=900
trainer.hooks.progress.EarlyStopHook: metric='Loss' patience=3 min_delta=0.0 on='test' priority=20
trainer.hooks.progress.StopOnSignal: priority=10
trainer.hooks.log.MLflowHook: interval=1 priority=10
trainer.hooks.log.TensorBoardHook: interval=1 priority=10
trainer.hooks.log.WandbHook: interval=1 priority=10
trainer.hooks.log.CsvHook: priority=10
trainer.hooks.log.JsonlHook: priority=10 report=True
trainer.metrics.MeanMetric: higher_is_better=False
trainer.records.StepRecord: weight=0.0 clipped=False skipped=False
trainer.trainer.Trainer.evaluate: return_output_label=True
trainer.trainer.Trainer.fit: test_interval=1 display_progress=False return_output_label=True
trainer.trainer.Trainer.request_stop: leave=False
utils.checkpoint: use_reentrant=False
utils.get_dataloader: shuffle=False seed=1024 add_sampler=True drop_last=False pin_memory=False num_workers=0
utils.sampler.DistinctDataSampler: shuffle=False seed=1024 drop_last=False
"""


def found(path: str) -> Any:
    """What lies at this path in the package."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"colonnade.{module}"), name)
    except ModuleNotFoundError:
        return getattr(found(module), name)


def test_defaults():
    for line in DEFAULTS.strip().splitlines():
        path, _, expected = line.partition(": ")
        given = [f"{one.name}={one.default!r}" for one in inspect.signature(found(path)).parameters.values()]
        assert [default for default in expected.split(" ") if default not in given] == [], (path, given)


def test_the_default_seed_and_the_oldest_torch_are_those_of_the_docs():
    launch = importlib.import_module("colonnade._launch")
    assert (launch.DEFAULT_SEED, launch.LEAST_TORCH) == (1024, (2, 11))


CONSTANTS = """
checkpoint.manifest.FORMAT: 2
checkpoint.full_weights.LARGEST: 5000000000
comm.messages.HOST_COPY_DELAY: 2
comm.torch_versions.DEFAULT_TIMEOUT: datetime.timedelta(seconds=1800)
comm.torch_versions.START_UP_TIMEOUT: datetime.timedelta(seconds=120)
engine.guard.EVERY: 100
engine.schedule.schedules.BaseSchedule.runs_backward: False
engine.schedule.schedules.BaseSchedule.uses_batch: True
engine.schedule.schedules.PipelineSchedule.runs_backward: True
context.dist_group_initializer.ProcessGroupInitializer.whole_world: True
optim.zero.zero_optimizer.ZeroOptimizer.is_sharded_elsewhere: True
trainer.hooks.hook.BaseHook.needs_loss: False
trainer.hooks.metric_hooks.LossHook.needs_loss: True
trainer.trainer.ASKS_AHEAD: {'cuda'}
trainer.trainer.LAG: {'cuda': 1}
trainer.metrics.Metric.higher_is_better: False
"""
"""What the docs say, what is on disk, and what classes that users derive from begin with."""


def test_constants():
    for line in CONSTANTS.strip().splitlines():
        path, _, expected = line.partition(": ")
        assert repr(found(path)) == expected, path


def test_the_notes_of_a_gradient_and_the_words_of_a_link_are_told_apart():
    bucket = importlib.import_module("colonnade.gradients.bucket")
    notes = [bucket.MISSING, bucket.OUTSIDE, bucket.SPARSE, bucket.FROZEN, bucket.FAILED]
    assert notes == [1 << bit for bit in range(5)]  # one bit each
    uneven = importlib.import_module("colonnade.gradients.uneven")
    assert uneven.FLAG_COUNT == 6 <= bucket.TAIL
    link = importlib.import_module("colonnade.engine.schedule.transfer")
    marks = [link._NEW, link._FAILED, link._NO_BATCH, link._SKIPPED]
    assert len({*marks}) == 4 > max(marks) + 4  # below any number of a description
    assert len({link._TENSOR, link._FRAME, link._TEXT, link._BY_CPU}) == 4
    assert link._APART != link._INSIDE
