"""Start a job's ranks on torchrun's elastic agent and report how it ended.

The agent is used in this process, not as a `torchrun` child: it owns what is hard (processes in sessions of
their own, signals, rendezvous of several machines, restarts), and here its log files, its failures and its
exit code can be turned into the one report that `colonnade run` promises. What is changed about where agents and ranks
meet is in `meeting`: on one machine the agent meets itself in a file, and no store listens on all interfaces.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from colonnade.constants import SAVED, STOPPED_IN_ORDER, TERMINAL
from colonnade.launching.bootstrap import LAUNCHER
from colonnade.launching.failures import Console, read_failure, report, silent_failure, who_failed
from colonnade.launching.launch_job import LaunchJob, cores
from colonnade.launching.meeting import BACKEND, PLACED, meetings
from colonnade.launching.outcome import Outcome, first_failure

_POLL_SECONDS = 0.1


def launch(job: LaunchJob) -> int:
    """Run the job to its end and return the exit status of this process."""
    nproc = job.nproc or torch.cuda.device_count() or 1
    _set_defaults(job, nproc)
    logging.disable(logging.CRITICAL)  # the agent's account of a failure; ours says it once
    with _folder(job) as folder, tempfile.TemporaryDirectory(prefix="colonnade-run-") as meeting:
        saved = Path(meeting) / "saved"
        os.environ[SAVED] = str(saved)
        console = Console(job.prefix)
        logs = RankLogs(folder, console)
        config = LaunchConfig(
            min_nodes=job.nnodes,
            max_nodes=job.nnodes,
            nproc_per_node=nproc,
            run_id=_run_id(job),
            max_restarts=job.max_restarts,
            monitor_interval=_POLL_SECONDS,
            logs_specs=logs,
            **_rendezvous(job, Path(meeting) / "store"),
        )
        try:
            elastic_launch(config, sys.executable)(*_command(job))
        except ChildFailedError as error:
            text, status = logs.report(error.failures)
            console.close()
            console.say("\n".join([*_saved(saved), text]))
            return status
        except SignalException as error:
            console.close()
            if logs.stopped_in_order():
                console.say(f"colonnade: stopped by {error.sigval.name}; the ranks finished their step and left")
                return STOPPED_IN_ORDER
            console.say("\n".join([*_saved(saved), f"colonnade: ended by {error.sigval.name}"]))
            return 128 + error.sigval
        console.close()
        return 0


def _saved(note: Path) -> list[str]:
    """What a run that ended early has saved, in words; nothing where it saves no checkpoints."""
    if not note.is_file():
        return []
    return [f"saved last: {note.read_text(encoding='utf-8')}"]


class RankLogs(LogsSpecs):
    """Where the agent sends each rank's output: rank<N>.stdout and .stderr, in restart<K> after a restart."""

    def __init__(self, folder: Path, console: Console) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._console = console
        self._current = folder
        self._ranks: list[int] = []

    @property
    def root_log_dir(self) -> str:
        """Return the folder of all logs."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of one start of all local ranks, and let the console follow them."""
        if meetings:  # torch counts on each machine what it saw fail itself
            for env in envs.values():
                env["TORCHELASTIC_RESTART_COUNT"] = str(meetings[-1].restarts)
        restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if restart:
            self._console.drain()
            first = first_failure(self._notes().values())
            if first is not None and first.lost_a_peer:
                why = f"{who_failed(first)} ({first.cause})" if first.told_of else "a rank died"
            else:
                why = first.headline if first is not None else "a rank died"
            self._console.say(f"colonnade: {why}; restart {restart}")
        self._current = self._folder / f"restart{restart}" if restart else self._folder
        self._current.mkdir(parents=True, exist_ok=True)
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self._ranks = list(ranks.values())
        for local_rank, rank in ranks.items():
            self._file(rank, "error").unlink(missing_ok=True)
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = str(self._file(rank, "error"))
        self._console.follow(
            [(rank, self._emptied(rank, "stdout"), self._emptied(rank, "stderr")) for rank in ranks.values()]
        )
        return LogsDest(
            stdouts={local_rank: str(self._file(rank, "stdout")) for local_rank, rank in ranks.items()},
            stderrs={local_rank: str(self._file(rank, "stderr")) for local_rank, rank in ranks.items()},
            error_files={local_rank: str(self._file(rank, "error")) for local_rank, rank in ranks.items()},
        )

    def report(self, failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
        """Return the text on the ranks that failed, with what they left, and the exit status.

        The agent ends the others as soon as it has seen one leave: who left a note and had not left yet counts too.
        """
        notes = self._notes()
        silent = {
            rank: silent_failure(rank, failure.exitcode, failure.timestamp)
            for rank, failure in failures.items()
            if rank not in notes
        }
        outcomes = {**notes, **silent}
        return report(outcomes, {rank: self._file(rank, "stderr") for rank in outcomes})

    def stopped_in_order(self) -> bool:
        """Whether every rank left by itself, with the exit status that says it may be started again."""
        notes = self._notes()
        return 0 < len(notes) == len(self._ranks) and all(note.exitcode == STOPPED_IN_ORDER for note in notes.values())

    def _notes(self) -> dict[int, Outcome]:
        """What ranks of the current start left when they failed."""
        found = {rank: read_failure(rank, self._file(rank, "error")) for rank in self._ranks}
        return {rank: note for rank, note in found.items() if note is not None}

    def _emptied(self, rank: int, kind: str) -> Path:
        file = self._file(rank, kind)
        file.write_bytes(b"")
        return file

    def _file(self, rank: int, kind: str) -> Path:
        return self._current / f"rank{rank}.{kind}"


def _command(job: LaunchJob) -> list[str]:
    kind = "module" if job.is_module else "script"
    names = "as-colossalai" if job.as_colossalai else "plain"
    return ["-u", "-m", "colonnade.launching.bootstrap", kind, names, job.target, *job.arguments]


def _rendezvous(job: LaunchJob, file: Path) -> dict[str, Any]:
    if job.nnodes == 1:
        return {
            "rdzv_backend": BACKEND,
            "rdzv_endpoint": str(file),
            "rdzv_configs": {"store_type": "file"},
            "local_addr": "127.0.0.1",
        }
    if job.node_rank is None:
        return {"rdzv_backend": BACKEND, "rdzv_endpoint": job.endpoint}
    return {
        "rdzv_backend": PLACED,
        "rdzv_endpoint": job.endpoint,
        "rdzv_configs": {"rank": job.node_rank},
    }


def _run_id(job: LaunchJob) -> str:
    """Machines of one job must agree on its name; a job on one machine has one nobody else has."""
    return uuid.uuid4().hex if job.nnodes == 1 else f"colonnade-{job.endpoint}"


def _set_defaults(job: LaunchJob, nproc: int) -> None:
    """Set, in this process whose environment the ranks inherit, what a job on shared cores wants."""
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.grace)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    os.environ.pop(TERMINAL, None)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and job.prefix != "all":
        os.environ[TERMINAL] = str(shutil.get_terminal_size().columns)
    if job.nnodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def _folder(job: LaunchJob) -> Iterator[Path]:
    """Yield the folder of the logs; without --log-dir it is gone afterwards."""
    if job.log_dir is not None:
        yield job.log_dir.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="colonnade-logs-") as folder:
        yield Path(folder)
