"""The training loop: read this first.

config -> index -> plan -> DALI views -> encoder -> projector -> loss -> step -> this loop -> checkpoint
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace

import torch

from trainer.cluster.ranks import Ranks, find_ranks
from trainer.commit import git_commit
from trainer.config import Config, flatten
from trainer.config_load import save_config
from trainer.data.loader import ViewLoader
from trainer.data.plan import PLAN_VERSION
from trainer.describe import describe_run
from trainer.device import choose_device
from trainer.distributed import is_of_lost_rank, process_group
from trainer.errors import DONE, FAILED, PREEMPTED, InputError, TrainingFailedError
from trainer.geometry import usable_ranks
from trainer.metrics import Late, LossSums, MetricsWriter, Progressed
from trainer.resume import resume, save
from trainer.run_folder import lock_run_folder, open_run_folder, start_logging
from trainer.run_state import RunState, wait_for_end
from trainer.saver import Saver
from trainer.schedule import evaluation_steps, kept_steps
from trainer.setup import Run, set_up
from trainer.signals import GO_ON, PREEMPT, STOP, StopRequest
from trainer.watchdog import Watchdog

_LOCK_SECONDS = 120.0  # a file server may hold the lock of a node that has died for a while
_HOST_DELAY = 2  # steps after which the host reads what a step left on the device
_log = logging.getLogger(__name__)


def pretrain(config: Config, stop: StopRequest) -> int:
    """Start the run of `config`, or go on with it if its folder holds a checkpoint. Returns the exit code."""
    ranks = find_ranks()
    run_dir = open_run_folder(config.run_dir)
    start_logging(None, ranks.rank)  # log.txt belongs to whoever holds the folder
    if config.allow_idle_ranks:
        used = usable_ranks(config, ranks.world_size)
        if ranks.rank >= used:
            return wait_for_end(run_dir, stop, config.stop_timeout_seconds)
        ranks = replace(ranks, world_size=used)
    with ExitStack() as stack:
        device, problem = _device(config, ranks)
        state = RunState(run_dir, ranks)

        def open_folder() -> None:
            """Take the run folder, once all ranks are there and before any of them continues."""
            stack.enter_context(lock_run_folder(run_dir, wait_seconds=_LOCK_SECONDS if ranks.restarts else 0.0))
            start_logging(run_dir, ranks.rank)
            state.start(config.max_idle_restarts)
            stop.before_exit = state.preempted
            stack.enter_context(state.heartbeat(stop))

        try:
            facts = {**flatten(config), "commit": git_commit(), "plan version": PLAN_VERSION, "problem": problem}
            with process_group(ranks, device, config.timeout_minutes, facts=facts, first=open_folder):
                run = set_up(config, ranks, device, run_dir)
                describe_run(run)
                stop.allow(config.stop_timeout_seconds)
                return train(run, stop, state)
        except BaseException as error:
            state.failed(error)
            if not is_of_lost_rank(error):
                raise
            _log.error("this rank ends: another rank is gone or late (%s)", str(error).partition("\n")[0])
            return FAILED


def _device(config: Config, ranks: Ranks) -> tuple[torch.device, str]:
    """This rank's device, and what is wrong with it: one of several ranks must tell the others before it ends."""
    try:
        return choose_device(config, ranks), ""
    except InputError as error:
        if ranks.world_size == 1:
            raise
        return torch.device("cpu"), str(error)


def train(run: Run, stop: StopRequest, state: RunState) -> int:
    """All steps from the newest checkpoint on. Returns DONE or PREEMPTED; raises TrainingFailedError."""
    # --- where we are ---
    ranks, log_every = run.ranks, run.config.log.every_steps
    sums = LossSums(run.device)
    first_step = step = resume(run, sums)
    open_writer = _writer(run, first_step, state)
    agreed, lines = Late(_HOST_DELAY), Late(_HOST_DELAY)
    faults, clock, saves = run.fault_counter(), _Clock(run, first_step), _SaveTimes(run)
    loader = run.loader(first_step)
    stopping = GO_ON

    with _watchdog(run, loader, state) as watchdog, open_writer as writer, closing(_saver(run)) as saver:
        # --- steps ---
        watchdog.doing(f"waits for the images of step {first_step}", for_files=True)
        for batch in loader:
            watchdog.doing(f"makes step {batch.step}, or waits for another rank in it")
            rate = run.schedule.learning_rate(batch.step)
            result = run.step(
                batch.views,
                run.permutations(batch.step),
                rate,
                stop=stop.level,
                save=ranks.is_first and saves.minutes_due(),
            )
            sums.add(result)
            step = batch.step + 1
            state.note(step=step, epoch=round(step / run.planner.steps_per_epoch, 3))

            # --- what the device says, two steps late ---
            clock.waited(batch.wait_seconds)
            agreed.put(batch.step, result.agreed)
            if step % log_every == 0 or step == run.schedule.total_steps:
                lines.put(clock.line(step, rate, len(loader.bad.ids)), sums.take(result.embeddings, ranks))
            save_now = saves.steps_due(step)
            for past_step, (fault, stop_asked, save_asked) in agreed.take():
                faults.count(past_step, int(fault))
                stopping = max(stopping, int(stop_asked))
                save_now |= bool(save_asked)
            _write(writer, lines.take(), state)

            # --- save, stop ---
            if stopping:
                stop.answered()
            if save_now or stopping or step == run.end_step:
                watchdog.doing("waits for the checkpoint before this one to be written", for_files=True)
                _write(writer, lines.take(everything=True), state)  # a resume after this step writes none of them again
                save(run, saver, step, sums)
                saves.done()
            _check_saves(run, saver)
            if stopping:
                break
            watchdog.doing(f"waits for the images of step {step}", for_files=True)
        watchdog.doing("waits for the last checkpoint to be written", for_files=True)
        _finish_saving(saver)
    return _finish(run, step, stopping if step < run.end_step else GO_ON, state)


def _watchdog(run: Run, loader: ViewLoader, state: RunState) -> Watchdog:
    def reading() -> str:
        longest = [f"{name} for {seconds:.0f} s" for name, seconds in loader.waiting_for()[:3]]
        return "reads " + ", ".join(longest) if longest else ""

    return Watchdog(
        run.config.log.stall_seconds,
        60 * run.config.timeout_minutes,
        reading,
        state.hung,
        lambda stall: state.note(doing=stall or None),
    )


def _writer(run: Run, first_step: int, state: RunState) -> AbstractContextManager[MetricsWriter | None]:
    if not run.ranks.is_first:
        return nullcontext()
    state.write(status="running", step=first_step, total_steps=run.schedule.total_steps)
    job = f" (SLURM job {run.ranks.job_id}, restart {run.ranks.restarts})" if run.ranks.job_id else ""
    _log.info("start %d of this run%s, at step %d of %d", state.starts, job, first_step, run.schedule.total_steps)
    save_config(run.config, run.run_dir / "config.yaml")
    return closing(MetricsWriter(run.run_dir, first_step, run.end_step, tensorboard=run.config.log.tensorboard))


def _write(writer: MetricsWriter | None, lines: list[tuple[Progressed, list[float]]], state: RunState) -> None:
    for at, values in lines:
        if writer:
            writer.write(at, values)
            loss = values[0] if math.isfinite(values[0]) else None
            state.note(loss=loss, images_per_s=round(at.images_per_s, 1))


def _saver(run: Run) -> Saver:
    kept = kept_steps(run.config, run.planner.steps_per_epoch)
    return Saver(run.checkpoints, run.config.checkpoint.keep_last, kept)


def _check_saves(run: Run, saver: Saver) -> None:
    """What checkpoint.on_failure says of a save that failed; the saver has logged it."""
    error = saver.failure()
    if error and run.config.checkpoint.on_failure == "stop":
        raise TrainingFailedError(
            f"a checkpoint could not be saved (checkpoint.on_failure is stop): {error}"
        ) from error


def _finish_saving(saver: Saver) -> None:
    try:
        saver.wait()
    except OSError as error:
        raise TrainingFailedError(
            f"the last checkpoint could not be saved, the work since the one before is lost: {error}"
        ) from error


def _finish(run: Run, step: int, stopped: int, state: RunState) -> int:
    """Write and log how the run ended; `stopped` is GO_ON if it came to its end."""
    code = PREEMPTED if stopped == PREEMPT else DONE
    finished = "done" if step == run.schedule.total_steps else "paused"
    status = {GO_ON: finished, PREEMPT: "preempted", STOP: "stopped"}[stopped]
    state.ended(status, code, step=step)
    if run.ranks.is_first:
        _log.info("%s after step %d of %d", status, step, run.schedule.total_steps)
    return code


class _Clock:
    """Rate and data wait since the last logged line."""

    def __init__(self, run: Run, first_step: int) -> None:
        self._run, self._step, self._since, self._wait = run, first_step, time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        self._wait += seconds

    def line(self, step: int, rate: float, bad_images: int) -> Progressed:
        seconds = time.perf_counter() - self._since
        images = (step - self._step) * self._run.config.data.images_per_step
        line = Progressed(
            step=step,
            epoch=step / self._run.planner.steps_per_epoch,
            learning_rate=rate,
            images_per_s=images / seconds,
            views_per_s=images * self._run.config.views.num_views / seconds,
            data_wait=self._wait / seconds,
            bad_images=bad_images,
        )
        self._step, self._since, self._wait = step, time.perf_counter(), 0.0
        return line


class _SaveTimes:
    """When a checkpoint is due, by steps (all ranks know) and by minutes (the first rank's clock, agreed in the step)."""

    def __init__(self, run: Run) -> None:
        self._config = run.config.checkpoint
        self._evaluated = evaluation_steps(run.config, run.planner.steps_per_epoch)
        self.done()

    def done(self) -> None:
        self._since, self._asked = time.monotonic(), False

    def steps_due(self, step: int) -> bool:
        by_steps = self._config.every_steps > 0 and step % self._config.every_steps == 0
        return by_steps or step in self._evaluated

    def minutes_due(self) -> bool:
        minutes = self._config.every_minutes
        due = minutes > 0 and not self._asked and time.monotonic() - self._since >= 60 * minutes
        self._asked |= due
        return due
