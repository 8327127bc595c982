"""The training loop: read this first.

config -> index -> plan -> DALI views -> networks -> loss -> step -> this loop -> checkpoint (docs/architecture.md)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.config.loading import save_config
from trainer.config.schema import Config, flatten
from trainer.data.loader import Batch, ViewLoader
from trainer.data.plan import PLAN_VERSION
from trainer.distributed.device import choose_device, compiles, memory_gib, names_nondeterministic
from trainer.distributed.geometry import batch_norm_group_size, usable_ranks
from trainer.distributed.peers import is_of_lost_rank
from trainer.distributed.process_group import peers, process_group, step_seconds
from trainer.distributed.ranks import Ranks, find_ranks
from trainer.errors import DONE, PREEMPTED, InputError, TrainingFailedError, exit_code_of
from trainer.files import describe_os_error
from trainer.metrics import Clock, DelayedMetrics, MetricSums, MetricsWriter, count_skipped_images
from trainer.run.certificate import attach_certificate
from trainer.run.commit import git_commit
from trainer.run.cost import RunCost, describe_cost
from trainer.run.digests import Digests
from trainer.run.faults import FaultCounter
from trainer.run.folder import lock_run_folder, open_run_folder, start_logging
from trainer.run.machine import provenance
from trainer.run.pace import Pace
from trainer.run.resume import resume, save
from trainer.run.saver import Saver
from trainer.run.shares import RankPace
from trainer.run.signals import GO_ON, PREEMPT, STOP, StopRequest
from trainer.run.starts import note_start, read_starts, rounding_changes
from trainer.run.state import RunState, note_lost_rank_0, wait_for_end
from trainer.run.tensorboard import Board
from trainer.run.trackers import Tracker, open_trackers
from trainer.run.watchdog import Watchdog
from trainer.schedule import evaluation_steps, kept_steps
from trainer.setup import Run, build_fault_counter, build_loader, set_up
from trainer.step import StepResult
from trainer.tools.dry_run import describe_run

_LOCK_SECONDS = 120.0  # a file server may keep the lock of a dead node for a while
_HOST_DELAY = 2  # steps after which the host reads what a step left on the device
_log = logging.getLogger(__name__)


def pretrain(config: Config, stop: StopRequest, sources: Mapping[str, str] | None = None) -> int:
    """Start the run of `config`, or resume it if its folder holds a checkpoint. Returns the exit code.

    sources: where each setting comes from, for the log and config.yaml."""
    ranks = find_ranks()
    run_dir = open_run_folder(config.run_dir)
    start_logging(None, ranks.rank)  # only a process that holds the folder may write log.txt
    # An idle rank waits until the run ends, because a launcher may take an early end for a failure.
    if config.allow_idle_ranks:
        used = usable_ranks(config, ranks.world_size)
        if ranks.rank >= used:
            return wait_for_end(run_dir, stop, config.stop_timeout_seconds)
        ranks = replace(ranks, world_size=used)
    with ExitStack() as stack:
        device, problem = _device(config, ranks)
        state = RunState(run_dir, ranks, RunCost(ranks, device, config.cost))

        def open_folder() -> None:
            """Lock the run folder, after all ranks have joined and before any of them continues."""
            stack.enter_context(lock_run_folder(run_dir, wait_seconds=_LOCK_SECONDS if ranks.restarts else 0.0))
            start_logging(run_dir, ranks.rank)
            state.start(config.max_idle_restarts)
            stop.before_exit = lambda: _note_signal(state)
            stack.enter_context(state.heartbeat(stop))

        try:
            # These values must be the same on all ranks; rank 0 compares them.
            facts = {**flatten(config), "commit": git_commit(), "plan version": PLAN_VERSION, "problem": problem}
            with (
                process_group(
                    config,
                    ranks,
                    device,
                    facts=facts,
                    first=open_folder,
                    before_exit=lambda failure: state.lost_rank(*failure),
                ),
                _failure_told_at_once(state),
            ):
                run = set_up(config, ranks, device, run_dir)
                run.sources = sources or {}
                describe_run(run)
                stop.allow(config.stop_timeout_seconds)
                return train(run, stop, state)
        except BaseException as error:
            state.failed(error)
            # Only the rank that failed first prints a traceback. The others name it and end with its exit code.
            if not is_of_lost_rank(error):
                raise
            _log.error("this rank ends, because %s", str(error).partition("\n")[0])
            if not ranks.is_first:
                note_lost_rank_0(run_dir, error)
            return exit_code_of(error)


def _note_signal(state: RunState) -> None:
    """Write to state.json why a signal ends the process before the loop.

    The cause may be another rank that failed, because a launcher then ends all ranks."""
    failure = peers().ask()
    if failure:
        state.lost_rank(*failure)
    else:
        state.preempted()


def _device(config: Config, ranks: Ranks) -> tuple[torch.device, str]:
    """Return this rank's device and what is wrong with it.

    With several ranks the problem is returned instead of raised, so that all ranks learn of it before any of them ends."""
    try:
        return choose_device(config, ranks), ""
    except InputError as error:
        if ranks.world_size == 1:
            raise
        return torch.device("cpu"), str(error)


def train(
    run: Run, stop: StopRequest, state: RunState, make_loader: Callable[[Run, int], ViewLoader] = build_loader
) -> int:
    """Make all steps from the newest checkpoint on. Returns DONE or PREEMPTED; raises TrainingFailedError.

    make_loader: builds the loader of the batches from a step on; benchmarks wrap it."""
    # --- resume, and build what the loop needs ---
    ranks, log_every = run.ranks, run.config.log.every_steps
    sums = MetricSums(run.step.method.metrics, run.device)
    first_step = step = resume(run, sums, state.cost)
    open_writer = _writer(run, first_step, state, sums.digests)
    late = DelayedMetrics(_HOST_DELAY)
    faults = build_fault_counter(run)
    clock = _clock(run, first_step)
    saves = _SaveTimes(run)
    loader = make_loader(run, first_step)
    pace = _pace(run, loader, stop)
    stopping = GO_ON
    file_seconds = 60 * run.config.timeout_minutes
    limits = _StepLimits(run)

    with (
        _watchdog(run, loader, state) as watchdog,
        open_writer as writer,
        closing(_saver(run)) as saver,
        _failure_told_at_once(state),
    ):
        # If another rank fails, this process ends only after a save in progress is complete.
        peers().is_saving = saver.under_way
        # --- steps ---
        watchdog.doing(f"waits for the images of step {first_step}", limit=file_seconds)
        for batch in loader:
            watchdog.doing(limits.describe(batch), limit=limits.seconds(batch))
            learning_rate = run.schedule.learning_rate(batch.step)
            # Only rank 0 knows when a save by minutes is due; the step's all-reduce tells the other ranks.
            save_due = ranks.is_first and saves.minutes_due()
            result = _make_step(run, batch, learning_rate, pace, stop=stop.level, save=save_due)
            sums.add(result, batch.rows_digest)
            step = batch.step + 1
            state.note(step=step, epoch=round(step / run.planner.steps_per_epoch, 3))

            # --- metrics: copied to the host now, read two steps later, since waiting for them would stall the device ---
            clock.waited(batch.wait_seconds)
            logged = step % log_every == 0 or step == run.schedule.total_steps
            known: dict[str, Any] = {}
            metrics: dict[str, Tensor] = {}
            if logged:
                spent = state.cost.own()
                known = {"lr": learning_rate, "own_spent": spent, **clock.line(step, pace.take_left_out())}
                known |= _machine(run, loader)
                metrics = _take_metrics(run, sums, result.embeddings, spent, pace.take())
            late.add(step, result.flags, known, metrics)
            if writer:
                writer.show_step(step, batch.views)

            # --- flags of two steps ago: count skipped updates, learn whether any rank was asked to stop or save ---
            stopping, save_now = _read_records(late.ready(step), faults, writer, state)

            # --- save, stop ---
            if stopping or save_now or saves.steps_due(step) or step == run.end_step:
                # Read the remaining records first: a resumed run then writes no line twice, and a fault that ends the run
                # prevents the save.
                last_stopping, _ = _read_records(late.ready(), faults, writer, state)
                stopping = max(stopping, last_stopping)
                if step == run.end_step and first_step == 0:
                    faults.check_progress()
                if stopping:
                    stop.answered()
                watchdog.doing("waits for the checkpoint before this one to be written", limit=file_seconds)
                with pace.saving():
                    save(run, saver, step, sums, state.cost)
                saves.done()
            _check_saves(run, saver)
            if stopping:
                break
            watchdog.doing(f"waits for the images of step {step}", limit=file_seconds)
        watchdog.doing("waits for the last checkpoint to be written", limit=file_seconds)
        _finish_saving(saver)
    return _finish(run, step, stopping if step < run.end_step else GO_ON, state)


def _make_step(run: Run, batch: Batch, learning_rate: float, pace: Pace, *, stop: int, save: bool) -> StepResult:
    """Make a step, which `pace` times. stop, save: what this rank asks the others for."""
    labels = run.labels(batch.image_ids)
    with names_nondeterministic():
        pace.before_step(batch, learning_rate, labels)
        result = run.step(
            batch.views,
            batch.step,
            learning_rate,
            labels=labels,
            stop=stop,
            save=save,
            delay=pace.delay,
        )
        pace.after_step()
    return result


@contextmanager
def _failure_told_at_once(state: RunState) -> Iterator[None]:
    """If the block raises, tell the other ranks and write state.json before anything is closed, since closing may block."""
    try:
        yield
    except BaseException as error:
        peers().tell(error)
        state.failed(peers().cause_of(error))
        raise


def _read_records(
    records: list[dict[str, Any]], faults: FaultCounter, writer: MetricsWriter | None, state: RunState
) -> tuple[int, bool]:
    """Count skipped updates and write metrics. Returns how the ranks agreed to stop, and whether they agreed to save."""
    stopping, save_now = GO_ON, False
    # The flags are the same on all ranks, so all of them stop and save after the same step.
    for record in records:
        faults.count(record["step"] - 1, int(record["fault"]))
        stopping = max(stopping, int(record["stop"]))
        save_now |= bool(record["save"])
        if writer and "loss" in record:
            writer.write(record)
            state.cost.add_line(record)
            loss = record["loss"] if math.isfinite(record["loss"]) else None
            state.note(loss=loss, images_per_s=record["images_per_s"])
    return stopping, save_now


def _take_metrics(
    run: Run, sums: MetricSums, embeddings: Tensor, spent: tuple[float, float], pace: RankPace
) -> dict[str, Tensor]:
    """Return the metrics since the last logged line, on the device.

    embeddings: of the last step. spent, pace: of this rank."""
    num_views = len(embeddings) // run.step.images.count  # MoCo has embeddings of one view
    metrics = sums.take(embeddings, run.ranks, num_views, spent, pace)
    if run.step.online_probe:
        metrics |= run.step.online_probe.take()
    return metrics


def _machine(run: Run, loader: ViewLoader) -> dict[str, float]:
    """Return the memory and the number of skipped images for a logged line."""
    used, limit = memory_gib(run.device)
    # Rank 0 writes the metrics, so only it reads the file that all ranks append to.
    skipped_images = 0
    if run.ranks.is_first:
        own_count = len(loader.skipped.ids)
        skipped_images = count_skipped_images(run.quarantine, own_count)
    return {
        "memory_gib": round(used, 3),
        "memory_limit_gib": round(limit, 3),
        "skipped_images": skipped_images,
    }


def _clock(run: Run, first_step: int) -> Clock:
    config = run.config
    return Clock(
        config.data.images_per_step, config.views.num_views, run.planner.steps_per_epoch, first_step, run.end_step
    )


def _pace(run: Run, loader: ViewLoader, stop: StopRequest) -> Pace:
    # With statistics of several ranks, each BatchNorm of the forward waits for the others.
    shares_statistics = batch_norm_group_size(run.config, run.ranks.world_size) > 1
    return Pace(run.step, loader, run.end_step, stop, forward_is_own=not shares_statistics)


def _watchdog(run: Run, loader: ViewLoader, state: RunState) -> Watchdog:
    def reading() -> str:
        slowest = loader.waiting_for()[:3]
        if not slowest:
            return ""
        listed = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in slowest)
        return f"reads {listed}"

    def tell_others(text: str) -> None:
        peers().tell(TrainingFailedError(text))

    def note_if_rank_0_is_lost(text: str) -> None:
        note_lost_rank_0(run.run_dir, TrainingFailedError(text))

    # Rank 0 writes the state itself. The others only write it if rank 0 no longer holds the run folder.
    before_exit = [tell_others, state.hung]
    if not run.ranks.is_first:
        before_exit.append(note_if_rank_0_is_lost)
    return Watchdog(
        run.config.log.stall_seconds,
        reading,
        before_exit,
        lambda stall: state.note(doing=stall or None),
    )


def _writer(
    run: Run, first_step: int, state: RunState, digests: Digests
) -> AbstractContextManager[MetricsWriter | None]:
    if not run.ranks.is_first:
        return nullcontext()
    state.write(status="running", step=first_step, total_steps=run.schedule.total_steps)
    # The log names the job, so that its output can be found.
    job = f" (SLURM job {run.ranks.job_id}, restart {run.ranks.restarts})" if run.ranks.job_id else ""
    _log.info("start %d of this run%s, at step %d of %d", state.starts, job, first_step, run.schedule.total_steps)
    save_config(run.config, run.run_dir / "config.yaml", run.sources)
    attach_certificate(run.run_dir, run.device)
    boards: list[Board | Tracker] = [*open_trackers(run.run_dir, run.config)]
    if run.config.log.tensorboard:
        boards.append(Board(run.run_dir, first_step, run.config))
    epochs = run.config.optimizer.epochs
    rounding = _note_start(run, first_step, digests)
    writer = MetricsWriter(
        run.run_dir, first_step, run.end_step, epochs, run.step.method, run.step.metrics, boards, digests, rounding
    )
    return closing(writer)


def _note_start(run: Run, first_step: int, digests: Digests) -> str:
    """Add this start to starts.jsonl. Returns what changed since the start before, so that results are rounded differently."""
    before = read_starts(run.run_dir)
    now = {
        "step": first_step,
        "world_size": run.ranks.world_size,
        **provenance(run.device),
        "images": {"fingerprint": run.index.fingerprint, "count": len(run.index)},
        "plan_version": PLAN_VERSION,
        "digests_since": digests.since,
    }
    note_start(run.run_dir, now)
    return rounding_changes(before[-1], now) if before else ""


def _saver(run: Run) -> Saver:
    kept = kept_steps(run.config, run.planner.steps_per_epoch)
    return Saver(run.checkpoints, run.config.checkpoint.keep_last, kept)


def _check_saves(run: Run, saver: Saver) -> None:
    """End the run if a save failed and checkpoint.on_failure is stop; the saver has logged the failure."""
    error = saver.failure()
    if error and run.config.checkpoint.on_failure == "stop":
        raise TrainingFailedError(
            f"a checkpoint could not be saved (checkpoint.on_failure is stop): {describe_os_error(error)}"
        ) from error


def _finish_saving(saver: Saver) -> None:
    try:
        saver.wait()
    except OSError as error:
        raise TrainingFailedError(
            f"the last checkpoint could not be saved, the work since the one before is lost: {describe_os_error(error)}"
        ) from error


def _finish(run: Run, step: int, stopped: int, state: RunState) -> int:
    """Write and log how the run ended. stopped: GO_ON if the loop came to its end."""
    code = PREEMPTED if stopped == PREEMPT else DONE
    # max_steps may end the loop before the end of the schedule.
    finished = "done" if step == run.schedule.total_steps else "paused"
    status = {GO_ON: finished, PREEMPT: "preempted", STOP: "stopped"}[stopped]
    state.cost.own()
    state.ended(status, code, step=step)
    if run.ranks.is_first:
        cost = describe_cost(state.cost.content())
        _log.info("%s after step %d of %d; cost so far: %s", status, step, run.schedule.total_steps, cost)
    return code


class _StepLimits:
    """Decides how long a step may hang before the watchdog ends the process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._size = 0
        self._long_until = 0

    def describe(self, batch: Batch) -> str:
        """Say what the step does, for the watchdog's messages."""
        compiling = compiles(self._run.config, self._run.device) and batch.views.shape[-1] != self._size
        first = " (the first at this size of the views is compiled, which takes minutes)" if compiling else ""
        others = ", or waits for another rank in it" if self._run.ranks.world_size > 1 else ""
        return f"makes step {batch.step}{first}{others}"

    def seconds(self, batch: Batch) -> float | None:
        """Return the limit of a step in seconds; None: no limit.

        The first step at each size of the views may compile, and the host notices two steps later that another rank still
        does."""
        size = batch.views.shape[-1]
        if size != self._size:
            self._size = size
            self._long_until = batch.step + _HOST_DELAY
        may_compile = batch.step <= self._long_until
        return step_seconds(self._run.config, self._run.ranks, self._run.device, may_compile=may_compile)


class _SaveTimes:
    """Decides when a checkpoint is due: by steps, which all ranks know, and by minutes, of which rank 0 tells the others."""

    def __init__(self, run: Run) -> None:
        self._config = run.config.checkpoint
        self._evaluated = evaluation_steps(run.config, run.planner.steps_per_epoch)
        self.done()

    def done(self) -> None:
        self._since = time.monotonic()
        self._asked = False

    def steps_due(self, step: int) -> bool:
        by_steps = self._config.every_steps > 0 and step % self._config.every_steps == 0
        return by_steps or step in self._evaluated

    def minutes_due(self) -> bool:
        # Ask for each save once: two steps pass before the ranks have agreed on it.
        minutes = self._config.every_minutes
        if minutes == 0 or self._asked:
            return False
        self._asked = time.monotonic() - self._since >= 60 * minutes
        return self._asked
