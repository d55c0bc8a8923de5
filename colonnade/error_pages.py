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
class ErrorPage:
    """One family of errors."""

    title: str
    means: str
    do: str
    more: str = ""
    """A page of the documents, without its ending."""

    def text(self, code: str) -> str:
        """As `colonnade explain` prints it."""
        more = f"\n\nMore, in the documents: {self.more}" if self.more else ""
        return f"{code}: {self.title}\n\n{self.means}\n\nWhat to do: {self.do}{more}"


PAGES: dict[str, ErrorPage] = {
    "C001": ErrorPage(
        "A config key that is not known, or a value that is not allowed",
        "All keys are checked before anything starts. A name that is nearly one of ours counts as a typing slip: "
        "`clip_grad_nrom` would otherwise silently do nothing.",
        "Take the name or value that the message gives. Keys of your own may have any other name and are in `gpc.config`. "
        "`colonnade config --keys` lists ours.",
        "reference/config",
    ),
    "C002": ErrorPage(
        "A config that cannot be read, or that is changed after `launch`",
        "A config is a path to a .py or .toml file, a dict or a Config. A .py file is executed, and what it raises is shown. After `launch` "
        "a config is frozen: every rank has read it.",
        "Correct the path, or the line of the file that is named; set values before `launch`.",
        "reference/config",
    ),
    "C003": ErrorPage(
        "A setting that contradicts another one, or that this part does not take",
        "Each part checks its own settings: clipping, ZeRO, precision, gradient handlers. Two settings that exclude each other are refused.",
        "Keep one of the two, or take a value that the message lists.",
        "reference/precision",
    ),
    "C004": ErrorPage(
        "A name that nobody has registered, or that is taken",
        "Handlers, hooks, schedules, orders and initializers are looked up by name. The module that registers yours must be imported "
        "before it is named.",
        "Import it first, or correct the name. To replace one that has the name, call `.remove(name)` of the registry before.",
        "reference/api/registry",
    ),
    "C005": ErrorPage(
        "The ranks do not agree",
        "Config, versions, seed, parameters, optimizer and settings of torch must be the same wherever that matters. They are compared "
        "before step 1, since a run whose ranks differ hangs, or trains something else without a word.",
        "The message names the first difference and the ranks on each side. Launch all ranks with the same script, arguments and "
        "versions; look for code that depends on the rank, the host's name or the time.",
        "understand/start_up",
    ),
    "C010": ErrorPage(
        "Sizes that do not fit the number of ranks",
        "pipeline x tensor x your axes must divide the number of ranks; what is left is data parallelism. Tensor modes want a square "
        "(2d), dim x dim x depth (2.5d) or a cube (3d). An expert size must divide the number of ranks that experts lie on.",
        "Take sizes that the message lists, or start another number of ranks: `colonnade run --nproc N`.",
        "reference/config",
    ),
    "C011": ErrorPage(
        "Groups or modes that cannot be made",
        "A mode's groups are lists of different ranks, each rank in at most one of them, in ascending order; the same on every rank.",
        "Correct what the initializer returns. `layout.groups(mode)` shows it without a process.",
        "howto/own_parallelism",
    ),
    "C012": ErrorPage(
        "A group, mode or stream that this context does not have",
        "Only modes of the config have groups, and a rank can ask only for groups that it is in.",
        "Add the mode under `parallel`, or ask `gpc.is_initialized(mode)` first.",
        "howto/device_mesh",
    ),
    "C013": ErrorPage(
        "Something that needs `launch` first, or a second `launch`",
        "Groups exist between `colonnade.launch(config)` and `gpc.destroy()`.",
        "Call `colonnade.launch(config)` first. To launch again, call `gpc.destroy()` before.",
        "understand/start_up",
    ),
    "C020": ErrorPage(
        "The environment does not say which rank this process is",
        "A launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, colonnade run), or SLURM_* or OMPI_*.",
        "Start the script by `colonnade run --nproc N script.py` or torchrun; for SLURM and OpenMPI use launch_from_slurm or "
        "launch_from_openmpi. `colonnade doctor` shows variables that an earlier launcher left behind.",
        "howto/start_on_a_cluster",
    ),
    "C021": ErrorPage(
        "The ranks did not meet",
        "Every rank connects to rank 0 at MASTER_ADDR:MASTER_PORT. One did not come in time, the port is taken, or a firewall is in between.",
        "Look at the output of the rank that is missing. Check that all got the same address and world size. On several machines, "
        "that the port is reachable and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the right interface. Run `colonnade doctor` on each.",
        "howto/start_on_a_cluster",
    ),
    "C022": ErrorPage(
        "A command line that cannot be started",
        "The command line is checked before a process is started.",
        "Follow the message, or see `colonnade run --help`. Options of `run` come before the script.",
        "reference/command_line",
    ),
    "C023": ErrorPage(
        "A torch that is too old, or whose version has a fault that would change gradients",
        "Colonnade needs torch 2.11 or newer, and 2.13 to compile models that are split.",
        "pip install --upgrade torch",
        "start/install",
    ),
    "C024": ErrorPage(
        "A package or a device that is not there",
        "Some features need more than torch: float8 (torchao and a GPU), models of Hugging Face (transformers), trackers, nccl.",
        "Install what the message names, or leave the feature out.",
        "reference/precision",
    ),
    "C030": ErrorPage(
        "An object that is not a placement, or a placement that does not fit the parameter",
        "A placement says on which modes a parameter is split (Shard), whole (Replicate) or shared by stages (Tied).",
        "Correct it as the message says; `placement_of(parameter)` shows the placement that a parameter has.",
        "howto/place_parameters",
    ),
    "C031": ErrorPage(
        "Placements that do not add up over the ranks",
        "The parts of a parameter on all ranks must make the whole. Marks that other libraries put on parameters are not read.",
        "Place the parameter on every rank that holds a part of it: `place(parameter, {mode: Shard(dim)})`.",
        "reference/handlers",
    ),
    "C032": ErrorPage(
        "A size that cannot be cut evenly over the ranks",
        "Features, heads, experts and vocabularies are cut in equal parts.",
        "Choose a size that the number of ranks divides (pad a vocabulary), or fewer ranks on that mode.",
        "reference/layers",
    ),
    "C033": ErrorPage(
        "Layers that do not fit each other",
        "The first forward pass follows how activations are split. A layer that takes whole inputs, behind one that gives parts, would "
        "compute something else.",
        "Put Linear(split='row') behind Linear(split='column'), or give the first one gather_output=True.",
        "reference/layers",
    ),
    "C034": ErrorPage(
        "A model that cannot be built without memory",
        "Inside `meta_init()` parameters have no values. What initialises them is noted, and done later, on each rank for its part.",
        "Initialise parameters by torch.nn.init inside it; compute nothing from their values there.",
        "understand/start_up",
    ),
    "C040": ErrorPage(
        "A gradient sum that no handler does",
        "From the placement of a parameter follows over which ranks its gradient must be summed. No handler does it, so ranks would "
        "train on parts of the gradient and drift apart.",
        "Add a handler for the mode, or correct the placement. `print(engine.ledger())` and `colonnade explain config.py` show who does "
        "what. If you know better, name the parameter in sync=dict(waive=[...]).",
        "reference/handlers",
    ),
    "C041": ErrorPage(
        "A gradient sum that is done twice, that no placement asks for, or that has the wrong divisor",
        "Two handlers that sum over the same ranks make a gradient N times too large; a divisor that is not the number of ranks with "
        "distinct data makes the step depend on the layout.",
        "Remove one of the handlers, or give the divisor that the message names.",
        "reference/handlers",
    ),
    "C042": ErrorPage(
        "A handler that cannot be understood or used",
        "Before step 1 a handler of yours is run once on made-up gradients, to see what it sums over which ranks. So it must change "
        "gradients in place, by sums over the groups of modes, or say itself what it sums.",
        "Inherit BaseGradientHandler and implement handle_gradient(). If its sums cannot be read off (it sends only a part of a "
        "gradient, say), define covers(), which returns what it sums.",
        "reference/handlers",
    ),
    "C043": ErrorPage(
        "A rank that left or did not come, so that others waited in vain",
        "Other ranks waited for this one in a sum or a transfer. It has died, is busy elsewhere, or has skipped a step.",
        "The cause is in the output of the rank that is named, not here: `colonnade run` shows the first failure last. If it still "
        "runs, `kill -USR1 PID` prints where it is; `launch(timeout=)` sets how long ranks wait.",
        "howto/debug_a_hang",
    ),
    "C044": ErrorPage(
        "Ranks that see the same data got different batches",
        "The tensor and pipeline ranks of one replica work on one batch together. With different batches they would mix samples without a word.",
        "Use colonnade.utils.get_dataloader, which deals samples out to the right ranks, or a sampler that goes by the data rank alone.",
        "howto/load_data",
    ),
    "C045": ErrorPage(
        "A loss of the wrong form",
        "A loss is a scalar mean, or (sum, count), the same form on all ranks and in all steps.",
        "Return criterion(...).mean(), or (sum, count) for means over uneven numbers of tokens.",
        "howto/uneven_batches",
    ),
    "C046": ErrorPage(
        "Calls of a training loop out of order",
        "A step is: zero_grad, then backward `gradient_accumulation` times, then step, after which gradients are reduced.",
        "Follow that order, and call engine.step(), not the optimizer's.",
        "understand/step",
    ),
    "C047": ErrorPage(
        "Replicas have come apart",
        "Ranks that must hold the same weights or gradients hold different ones: an op that differs by rank, a parameter that was "
        "changed on one rank, a memory fault.",
        "The message names rank, parameter and step. `colonnade verify` finds the cause in a short run.",
        "reference/explain",
    ),
    "C048": ErrorPage(
        "A gradient or norm that is not finite",
        "A gradient has an inf or a NaN. The step was dropped on all ranks.",
        "Look at the loss before that step, lower the learning rate, clip, or use bf16 instead of fp16.",
        "howto/drop_bad_steps",
    ),
    "C050": ErrorPage(
        "A model that cannot be cut into stages as asked",
        "`colonnade.split` cuts a chain of layers, or a model whose forward pass it can follow on a sample.",
        "Give pipeline_layers(), or sample=, or other places to cut, as the message says.",
        "reference/schedules",
    ),
    "C051": ErrorPage(
        "A schedule or a table of actions that cannot run",
        "Tables are checked before they run: each pass once, in an order that cannot block.",
        "Take a known schedule, or correct the table at the place that the message names.",
        "reference/schedules",
    ),
    "C052": ErrorPage(
        "A batch that cannot be cut into micro-batches",
        "A pipeline cuts every tensor of a batch along dimension 0. Evaluations fill up a batch that is too small with rows that do not count; training does not.",
        "Let num_microbatches be at most the number of rows, and give tensors with the same number of rows.",
        "reference/schedules",
    ),
    "C053": ErrorPage(
        "Something that cannot go from stage to stage",
        "Tensors, numbers, strings and containers of them travel. What a stage takes must be what the one before gives.",
        "Convert it in the stage, or cut elsewhere.",
        "reference/schedules",
    ),
    "C054": ErrorPage(
        "A pipeline that stopped in an earlier step",
        "A step failed on some rank, and messages of it may still be under way.",
        "Look at the first error, on the rank that is named; then build a new engine or start again from a checkpoint.",
        "reference/schedules",
    ),
    "C060": ErrorPage(
        "A plan that does not fit the model",
        "A plan gives a style to names of layers. Unknown styles, names that fit nothing, ties that would be cut and shapes that cannot be "
        "cut are refused before step 1.",
        "Correct the entry that is named; parallelize(sample=...) compares the cut model with the whole one.",
        "reference/plans",
    ),
    "C061": ErrorPage(
        "A model or batch of Hugging Face that cannot be run in this layout",
        "Some models have parts that cannot run under sequence, pipeline or expert parallelism here. They are refused, since they would be "
        "trained wrongly.",
        "Leave that axis out for this model, or change the option that is named.",
        "howto/huggingface",
    ),
    "C070": ErrorPage(
        "An optimizer that cannot step on parts, has parameters of others, or was changed after initialize",
        "initialize() lays out the optimizer's parameters in flat memory, once. Stages 1 and 2 of ZeRO, and parameters that are split over "
        "ranks (tensor, expert), want an element-wise optimizer, which Muon and Adafactor are not.",
        "Make parameter groups before initialize(), of the model's parameters alone. Use AdamW, Adam or SGD, or another stage.",
        "reference/zero",
    ),
    "C080": ErrorPage(
        "No checkpoint in that folder",
        "The folder of a run has folders step-..., one for each checkpoint. A save that was interrupted leaves none.",
        "`colonnade ckpt ls FOLDER` shows what there is and what is wrong with it.",
        "howto/checkpoint",
    ),
    "C081": ErrorPage(
        "A file that is damaged, cut off or of another format",
        "The manifest has the size and the hash of every file, and a file has others.",
        "`colonnade ckpt verify FOLDER` reads every byte. A run goes on from the newest good one by itself.",
        "reference/trainer",
    ),
    "C082": ErrorPage(
        "A checkpoint of another model",
        "Names and shapes of whole parameters are compared. The layout may be another one; the model must be the same.",
        "The message lists what is missing, left over or of another shape. Build the model as it was saved.",
        "reference/weights",
    ),
    "C083": ErrorPage(
        "A checkpoint of another optimizer or clip method",
        "The saved state means something else to this optimizer or clip method.",
        "Use the same optimizer and groups, or load with optimizer=None and start its state anew.",
        "reference/weights",
    ),
    "C084": ErrorPage(
        "A checkpoint that cannot be written",
        "There is no space or no permission, not all ranks see the folder, or another run writes there.",
        "Earlier checkpoints are untouched. Choose a folder on a file system that all ranks share; end the other run.",
        "reference/trainer",
    ),
    "C085": ErrorPage(
        "A value that a checkpoint cannot hold",
        "State is made of None, booleans, numbers, texts, tensors and lists and dicts of them: no code is run when it is read.",
        "Let state_dict() return only these.",
        "reference/trainer",
    ),
    "C086": ErrorPage(
        "A pickle, which can run code when it is read",
        "Weights in pickles (.bin, DCP's metadata) are read only when you say so.",
        "If you trust who wrote it: --trust, or trust=True. Better: safetensors.",
        "reference/weights",
    ),
    "C090": ErrorPage(
        "Data loaders that do not fit the layout",
        "Where forward passes need all ranks (experts, ZeRO 3), all ranks need equally many batches. And a loader must give batches, not samples.",
        "Use colonnade.utils.get_dataloader(dataset, batch_size=...), or drop_last=True.",
        "howto/load_data",
    ),
    "C091": ErrorPage(
        "A hook that raised",
        "The error of a hook on any rank is raised on every rank, with the point and the step.",
        "The message ends with the hook's own error, which is the cause.",
        "reference/trainer",
    ),
    "C092": ErrorPage(
        "A hook or a trainer with arguments that cannot be used",
        "They are checked when they are made or attached, before step 1.",
        "Follow the message.",
        "reference/trainer",
    ),
    "C100": ErrorPage(
        "A run that cannot be compared with one process, or is not equal to it",
        "`colonnade verify` needs a model and batches that one process can have too.",
        "Follow the message. The page of verify shows what a script needs.",
        "reference/verify",
    ),
    "C130": ErrorPage(
        "An evaluation that some of the ranks make alone",
        "The parameters are split over ranks (tensor or expert parallelism), so that a forward pass sends activations between them. A pass "
        "on one rank alone would meet those of the others' training step, and give a wrong number.",
        "Call the model on every rank, in evaluation as in training, and only print or log under `if rank == 0`.",
        "howto/from_ddp",
    ),
    "C131": ErrorPage(
        "Clipping beside a waived parameter that is split over ranks with different data",
        "A waived parameter is clipped by the norm that each replica of the model has. A replica that holds a part of it cannot tell its norm.",
        "Do not waive it, or turn clip_grad_norm off and clip in a handler of your own.",
        "howto/replicas_that_differ",
    ),
    "C132": ErrorPage(
        "A batch that is given to one stage of a pipeline",
        "Under a pipeline a rank has one stage of the model. engine(batch) would run that stage alone; a schedule cuts the batch into micro-batches and "
        "sends activations and gradients between the stages.",
        "engine.execute_schedule(iter([batch])) on every rank, in place of engine(batch) and engine.backward(loss); then engine.step().",
        "howto/cut_for_a_pipeline",
    ),
    "C101": ErrorPage(
        "A function that cannot be run on other processes",
        "run_world sends a function by the name of its module, and its arguments by value.",
        "Define the function at the top level of a file, and pass plain data.",
        "howto/test_my_code",
    ),
    "C115": ErrorPage(
        "An older spelling of a keyword of run_world",
        "Keywords that run_world does not know go to the function that the ranks call. `init=` is what `backend=` was called once, so it is refused "
        "instead of being passed on, unless that function names a parameter `init`.",
        'Write backend=: "gloo", "nccl", or None for a function that launches by itself.',
        "howto/test_my_code",
    ),
    "C116": ErrorPage(
        "A value that a comparison cannot tell to another rank",
        "`verify` sends what ranks noted, and their batches, to the first rank: as JSON and the bytes of tensors, never as pickles, which could run "
        "code where they are read. Numbers, texts, tensors, and tuples, lists, dicts, dataclasses and named tuples of them travel.",
        "Let the batch consist of these; define a dataclass or a named tuple at the top of a module.",
        "reference/verify",
    ),
    "C117": ErrorPage(
        "A wait for other ranks that has ended at its limit",
        "This rank waited for others as long as `timeout=` of launch allows. The message says where they are, with their hosts: dead, stopped, silent "
        "(its host is dead or cut off), or at another place of the step.",
        "Look at the output of the ranks that are named and at their hosts; where they are elsewhere in the step, make the same calls on all ranks.",
        "howto/debug_a_hang",
    ),
    "C120": ErrorPage(
        "A URL where a path is needed",
        "Checkpoints, outputs, reports, logs, exports, configs and folders of models are read from and written to file systems. `s3://bucket/run` "
        "as a path would be a local folder named `s3:`, which is gone with the machine, so URLs are refused wherever a path is taken.",
        "Give a path of a file system that all ranks see, and copy finished checkpoints from there to the object store. A folder whose name "
        "really begins like a URL can be given by its absolute path.",
        "howto/checkpoint",
    ),
    "C160": ErrorPage(
        "Pipeline stages that are all the same model",
        "With a pipeline each rank trains its stage of the model. The parameters of all stages have equal names, shapes and values, so every rank has "
        "brought the whole model: a step would run it several times in a row, with other results than one process.",
        "Cut the model: model = colonnade.split(model, num_stages=...) before initialize(). If the stages start equal on purpose, pass them as "
        "colonnade.split([first, second, ...]), or set compare_stages=False in the config.",
        "howto/cut_for_a_pipeline",
    ),
    "C121": ErrorPage(
        "The state of an optimizer that zero has sharded, asked of the optimizer itself",
        "At stages 1 and 2 each rank keeps the state of its slices, and the optimizer that was given to initialize() has none. Its "
        "`state_dict()` would be empty, and what its `load_state_dict()` loads would be ignored.",
        "Save and load with CheckpointManager, or ask `engine.optimizer` on every rank. A state from elsewhere is loaded before initialize().",
        "reference/zero",
    ),
    "C161": ErrorPage(
        "Groups of an initializer from which a rank's place cannot be read",
        "An initializer may group the ranks of an axis otherwise than the grid does. The place of a rank on the axis is then its position in its group, and its "
        "place in the data is the number of its replica. That needs groups of the axis's size with every rank in one, each at one place of the other "
        "axes, and ranks that ascend along the modes by which layers are cut.",
        "Correct the groups that the message names. build_layout(config, world_size) of colonnade.context.layout_builder tries them without a process. Groups that are "
        "those of no axis belong to a mode of another name.",
        "howto/write_a_mode",
    ),
    "C162": ErrorPage(
        "A parameter on a mode whose groups join ranks that see other data",
        "A mode is registered with data='same', and its groups were written down across ranks of an axis that see distinct data. A part of a parameter would "
        "be held by ranks whose gradients are of other samples, and no sum would be that of one process.",
        "Return groups of ranks of one replica, give the mode an axis of its own in `parallel`, or register it with data='distinct'.",
        "howto/write_a_mode",
    ),
}


def find(code: str) -> ErrorPage | None:
    """The page of a code, in any case of letters."""
    return PAGES.get(code.upper())


def unknown(code: str) -> str:
    """What to say of a code that does not exist."""
    return f"there is no code {code!r}.{did_you_mean(code, PAGES)} The codes are {', '.join(PAGES)}"


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
