"""What the codes at the end of error messages mean: `colonnade explain C040`, and docs/reference/errors.md made of this table.

`python -m colonnade.error_pages docs/reference/errors.md` writes that page.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import did_you_mean


@dataclass(frozen=True)
class Page:
    """One family of errors."""

    title: str
    means: str
    do: str
    more: str = ""
    """A page of the documents, without its ending."""

    def text(self, code: str) -> str:
        """As `colonnade explain` prints it."""
        more = f"\n\nMore: docs/{self.more}.md" if self.more else ""
        return f"{code}: {self.title}\n\n{self.means}\n\nWhat to do: {self.do}{more}"


PAGES: dict[str, Page] = {
    "C001": Page(
        "A config key that is not known, or a value that is not allowed",
        "Keys of our sections are checked as a whole before anything starts. A near miss of one of our keys counts as a slip, too: "
        "`clip_grad_nrom` would otherwise be silently without effect.",
        "Take the name or value that the message gives. Keys of your own may have any other name and are in `gpc.config`.",
        "understand/start_up",
    ),
    "C002": Page(
        "Something that is no config, or a config that is changed too late",
        "A config is a path to a .py or .toml file, a dict or a Config. After `launch` it is frozen: every rank has read it.",
        "Give one of these, and set values before `launch`.",
        "understand/start_up",
    ),
    "C003": Page(
        "A setting that contradicts another one, or that this part does not take",
        "Each part checks its own settings: clipping, ZeRO, precision, gradient handlers. Two that cannot both be meant are refused.",
        "Keep one of the two, or take a value that the message lists.",
        "reference/precision",
    ),
    "C004": Page(
        "A name that nobody has registered, or that is taken",
        "Handlers, hooks, schedules, orders and initializers are looked up by name. The module that registers yours must be imported "
        "before it is named.",
        "Import it first, or correct the name; for a second one of the same name call `.remove(name)` before.",
        "reference/handlers",
    ),
    "C005": Page(
        "The ranks do not agree",
        "Config, versions, seed, parameters, optimizer and settings of torch must be the same wherever that matters. They are compared "
        "before step 1, as different ones hang or train something else in silence.",
        "The message names the first difference and the ranks on each side. Launch all ranks with the same script, arguments and "
        "versions; look for code that depends on the rank, the host's name or the time.",
        "understand/start_up",
    ),
    "C010": Page(
        "Sizes that do not make the world",
        "pipeline x tensor x your axes must divide the number of ranks; what is left is data parallelism. Tensor modes want a square "
        "(2d), dim x dim x depth (2.5d) or a cube (3d). An expert size divides the ranks that it lies on.",
        "Take sizes that the message lists, or start another number of ranks: `colonnade run --nproc N`.",
        "reference/words",
    ),
    "C011": Page(
        "Groups or modes that are none",
        "A mode's groups are lists of different ranks, each rank in at most one of them, in ascending order; the same on every rank.",
        "Correct what the initializer returns. `layout.groups(mode)` shows it without a process.",
        "howto/own_parallelism",
    ),
    "C012": Page(
        "A group, mode or stream that this context does not have",
        "Only modes of the config have groups, and a rank asks only for groups that it is in.",
        "Add the mode under `parallel`, or ask `gpc.is_initialized(mode)` first.",
        "reference/words",
    ),
    "C013": Page(
        "Called before `launch`, or after another one",
        "Groups exist between `colonnade.launch(config)` and `gpc.destroy()`.",
        "Call `colonnade.launch(config)` first; to launch again, `destroy()` before.",
        "understand/start_up",
    ),
    "C020": Page(
        "The environment does not say where this process stands",
        "A launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, colonnade run), or SLURM_* or OMPI_*.",
        "Start the script by `colonnade run --nproc N script.py` or torchrun; for SLURM and OpenMPI use launch_from_slurm or "
        "launch_from_openmpi. `colonnade doctor` shows stale variables.",
        "understand/start_up",
    ),
    "C021": Page(
        "The ranks did not meet",
        "Every rank connects to rank 0 at MASTER_ADDR:MASTER_PORT. One did not come in time, the port is taken, or a firewall is between.",
        "Look at the output of the rank that is missing. Check that all got the same address and world size. On several machines, "
        "that the port is reachable and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the right interface. `colonnade doctor` on each.",
        "understand/start_up",
    ),
    "C022": Page(
        "A command line that cannot be started",
        "Everything is checked before a process is started.",
        "Follow the message; `colonnade run --help`. Options of `run` come before the script.",
        "",
    ),
    "C023": Page(
        "A torch that is too old, or that has a fault which would change gradients",
        "Colonnade needs torch 2.11 or newer, and 2.13 to compile models that are split.",
        "pip install --upgrade torch",
        "",
    ),
    "C024": Page(
        "A package or a device that is not there",
        "Some features need more than torch: float8 (torchao and a GPU), models of Hugging Face (transformers), trackers, nccl.",
        "Install what the message names, or leave the feature out.",
        "reference/precision",
    ),
    "C030": Page(
        "A placement that is none, or does not fit the parameter",
        "A placement says on which modes a parameter is split (Shard), whole (Replicate) or shared by stages (Tied).",
        "Correct it as the message says; `placement_of(parameter)` shows what there is.",
        "reference/handlers",
    ),
    "C031": Page(
        "Placements that do not add up over the ranks",
        "The parts of a parameter, over the ranks that hold them, must be the whole. A mark of another library is not read.",
        "Place the parameter on every rank that holds a part of it: `place(parameter, {mode: Shard(dim)})`.",
        "reference/handlers",
    ),
    "C032": Page(
        "A size that cannot be cut evenly over the ranks",
        "Features, heads, experts and vocabularies are cut in equal parts.",
        "Choose a size that the number of ranks divides (pad a vocabulary), or fewer ranks on that mode.",
        "reference/layers",
    ),
    "C033": Page(
        "Layers that do not fit each other",
        "In the first forward pass it is followed how activations lie. A layer for whole inputs behind one that gives parts would "
        "compute something else.",
        "After Linear(split='column') comes Linear(split='row'); or gather_output=True.",
        "reference/layers",
    ),
    "C034": Page(
        "A model that cannot be built without memory",
        "Inside `meta_init()` parameters have no values, and what initialises them is noted and done later, in parts.",
        "Initialise parameters by torch.nn.init inside it; compute nothing from their values there.",
        "understand/start_up",
    ),
    "C040": Page(
        "A gradient sum that nobody does",
        "From the placement of a parameter follows over which ranks its gradient must be summed. No handler does it, so ranks would "
        "train on parts of the gradient and drift apart.",
        "Add a handler for the mode, or correct the placement. `print(engine.ledger())` and `colonnade explain config.py` show who does "
        "what. If you know better, name the parameter in sync=dict(waive=[...]).",
        "reference/handlers",
    ),
    "C041": Page(
        "A gradient sum that is done twice, that nobody owes, or with another divisor",
        "Two handlers that sum over the same ranks make a gradient N times too large; a divisor that is not the number of ranks with "
        "distinct data makes the step depend on the layout.",
        "Remove one of the handlers, or give the divisor that the message names.",
        "reference/handlers",
    ),
    "C042": Page(
        "A handler that cannot be understood or used",
        "A handler of yours is tried on small whole numbers to see what it sums over whom. It must change gradients in place, by sums "
        "over groups of modes, or declare what it does.",
        "Inherit BaseGradientHandler, or define covers(); see the page.",
        "howto/own_parallelism",
    ),
    "C043": Page(
        "A rank that left or did not come: a hang that was ended",
        "The others waited for a rank in a sum or a transfer. It has died, is still somewhere else, or has skipped a step.",
        "The cause is in the output of the rank that is named, not here: `colonnade run` shows the first failure last. If it still "
        "runs, `kill -USR1 PID` prints where it is; `launch(timeout=)` sets how long ranks wait.",
        "understand/step",
    ),
    "C044": Page(
        "Ranks that see the same data got different batches",
        "Tensor, pipeline and sequence ranks of one replica work on one batch. Different ones mix samples in silence.",
        "Use colonnade.utils.get_dataloader, which shares samples over the right ranks, or a sampler by the data rank alone.",
        "understand/step",
    ),
    "C045": Page(
        "A loss of the wrong form",
        "A loss is a scalar mean, or (sum, count), the same form on all ranks and in all steps.",
        "Return criterion(...).mean(), or (sum, count) for means over uneven numbers of tokens.",
        "reference/handlers",
    ),
    "C046": Page(
        "Calls of a training loop out of order",
        "A step is zero_grad, backward `gradient_accumulation` times, step. Gradients are summed in step().",
        "Follow that order; step by engine.step(), not by the optimizer.",
        "understand/step",
    ),
    "C047": Page(
        "Replicas have come apart",
        "Ranks that must hold the same weights or gradients hold different ones: an op that differs by rank, a parameter that was "
        "changed on one rank, a memory fault.",
        "The message names rank, parameter and step. `colonnade verify` finds the cause in a short run.",
        "reference/explain",
    ),
    "C048": Page(
        "A gradient or norm that is not finite",
        "Inf or NaN in a gradient. The step was dropped on all ranks.",
        "Look at the loss before that step, lower the learning rate, clip, or use bf16 instead of fp16.",
        "reference/clipping",
    ),
    "C050": Page(
        "A model that cannot be cut into stages as asked",
        "`colonnade.split` cuts a chain of layers, or follows a forward pass without computing.",
        "Give pipeline_layers(), or sample=, or other places to cut, as the message says.",
        "reference/schedules",
    ),
    "C051": Page(
        "A schedule or a table of actions that cannot run",
        "Tables are checked before they run: each pass once, in an order that cannot block.",
        "Take a known schedule, or correct the table at the place that the message names.",
        "reference/schedules",
    ),
    "C052": Page(
        "A batch that cannot be cut into micro-batches",
        "A pipeline cuts every tensor of a batch along dimension 0.",
        "Set num_microbatches to a number of rows or less; give tensors with the same number of rows.",
        "reference/schedules",
    ),
    "C053": Page(
        "Something that cannot go from stage to stage",
        "Tensors, numbers, strings and containers of them travel. What a stage takes must be what the one before gives.",
        "Convert it in the stage, or cut elsewhere.",
        "reference/schedules",
    ),
    "C054": Page(
        "A pipeline that stopped in an earlier step",
        "A step failed on some rank, and messages of it may still be under way.",
        "Look at the first error, on the rank that is named; then build a new engine or start again from a checkpoint.",
        "reference/schedules",
    ),
    "C060": Page(
        "A plan that does not fit the model",
        "A plan gives names of layers a style. Unknown styles, names that fit nothing, ties that would be cut and shapes that cannot be "
        "cut are refused before step 1.",
        "Correct the entry that is named; parallelize(sample=...) compares the cut model with the whole one.",
        "reference/plans",
    ),
    "C061": Page(
        "A model or batch of Hugging Face that cannot be run in this layout",
        "Some models have parts that are not known under sequence, pipeline or expert parallelism; they are refused instead of being "
        "trained wrongly.",
        "Leave that axis out for this model, or change the option that is named.",
        "howto/huggingface",
    ),
    "C070": Page(
        "An optimizer that cannot step on parts, has parameters of others, or was changed after initialize",
        "ZeRO and flat steps know the optimizer's parameters from initialize() on; stages 1 and 2, and parameters that are split over "
        "ranks (tensor, expert), want an element-wise optimizer, which Muon and Adafactor are not.",
        "Make groups before initialize(), of the model's parameters alone; use AdamW, Adam or SGD, or another stage.",
        "reference/zero",
    ),
    "C080": Page(
        "No checkpoint there",
        "The folder of a run has folders step-..., each published by one rename when all of it was on disk.",
        "`colonnade ckpt ls FOLDER` shows what there is and what is wrong with it.",
        "reference/trainer",
    ),
    "C081": Page(
        "A file that is damaged, cut off or of another format",
        "Sizes and hashes of all files are in the manifest; one does not fit.",
        "`colonnade ckpt verify FOLDER` reads every byte. A run goes on from the newest good one by itself.",
        "reference/trainer",
    ),
    "C082": Page(
        "A checkpoint of another model",
        "Names and shapes of whole parameters are compared; the layout may be another one, the model not.",
        "The message lists what is missing, too much or of another shape. Build the model as it was saved.",
        "reference/weights",
    ),
    "C083": Page(
        "A checkpoint of another optimizer or clip method",
        "Its state would be stepped on in another way.",
        "Use the same optimizer and groups, or load with optimizer=None and start its state anew.",
        "reference/weights",
    ),
    "C084": Page(
        "A checkpoint that cannot be written",
        "No space, no permission, a folder that not all ranks see, or another run that writes there.",
        "Earlier checkpoints are untouched. Choose a folder on a file system that all ranks share; end the other run.",
        "reference/trainer",
    ),
    "C085": Page(
        "A value that a checkpoint cannot hold",
        "State is made of None, booleans, numbers, texts, tensors and lists and dicts of them: no code is run when it is read.",
        "Give state_dict() that returns these.",
        "reference/trainer",
    ),
    "C086": Page(
        "A pickle, which can run code when it is read",
        "Weights in pickles (.bin, DCP's metadata) are read only when you say so.",
        "If you trust who wrote it: --trust, or trust=True. Better: safetensors.",
        "reference/weights",
    ),
    "C090": Page(
        "Data loaders that do not fit the layout",
        "Where forward passes need all ranks, all need equally many batches; a loader gives batches, not samples.",
        "colonnade.utils.get_dataloader(dataset, batch_size=...) does; or drop_last=True.",
        "reference/trainer",
    ),
    "C091": Page(
        "A hook that raised",
        "The error of a hook on any rank is raised on every rank, with the point and the step.",
        "The cause is the error at its end.",
        "reference/trainer",
    ),
    "C092": Page(
        "A hook or a trainer with arguments that cannot be used",
        "They are checked when they are made or attached, before step 1.",
        "Follow the message.",
        "reference/trainer",
    ),
    "C100": Page(
        "A run that cannot be compared with one process, or is not equal to it",
        "`colonnade verify` needs a model and batches that one process can have too.",
        "Follow the message; the page shows what scripts need.",
        "reference/verify",
    ),
    "C101": Page(
        "A function that cannot be run on other processes",
        "run_world sends a function by name, and its arguments by value.",
        "Move the function to the top of a file, and pass plain data.",
        "howto/own_parallelism",
    ),
}


def find(code: str) -> Page | None:
    """The page of a code, in any case of letters."""
    return PAGES.get(code.upper())


def unknown(code: str) -> str:
    """What to say of a code that is none."""
    return f"there is no code {code!r}.{did_you_mean(code, PAGES)} docs/reference/errors.md lists all of them"


def codes_in(text: str) -> list[str]:
    """The codes that a message ends with, or holds at the ends of messages inside it."""
    return [code for code in re.findall(r"\[(C\d{3})\]", text) if code in PAGES]


def document() -> str:
    """docs/reference/errors.md."""
    head = (
        "# Error codes\n\n"
        "Errors that users meet end in a code, such as `[C040]`. `colonnade explain C040` prints its page from here. "
        "All are subclasses of `colonnade.errors.ColonnadeError`, and have it as `error.code`.\n"
        "This page is written by `python -m colonnade.error_pages docs/reference/errors.md`.\n"
    )
    parts = [head]
    for code, page in PAGES.items():
        more = f" More: [{page.more}](../{page.more}.md)." if page.more else ""
        parts.append(f"## {code}: {page.title}\n\n{page.means}\n\n**What to do.** {page.do}{more}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
