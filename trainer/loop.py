"""The training loop: read this first.

config -> index -> plan -> DALI views -> encoder -> projector -> loss -> step -> this loop -> checkpoint
"""

from __future__ import annotations

import logging
import time

from trainer.checkpoint import list_checkpoints
from trainer.config import Config
from trainer.config_load import save_config
from trainer.describe import describe_run
from trainer.device import choose_device
from trainer.distributed import find_ranks, process_group
from trainer.errors import BAD_INPUT, DONE, FAILED, PREEMPTED, InputError
from trainer.metrics import Late, LossSums, MetricsWriter, Progressed
from trainer.resume import resume, save
from trainer.run_folder import open_run_folder, start_logging, write_state
from trainer.setup import Run, set_up
from trainer.signals import StopRequest, stop_on_signals

_HOST_DELAY = 2  # steps after which the host reads what a step left on the device
_log = logging.getLogger(__name__)


class TrainingFailedError(RuntimeError):
    """Training can't go on; the last good checkpoint stays."""


def pretrain(config: Config) -> int:
    """Start the run of `config`, or go on with it where its folder holds a checkpoint. Returns the exit code."""
    ranks = find_ranks()
    run_dir = open_run_folder(config.run_dir)
    start_logging(run_dir, is_first=ranks.is_first)
    try:
        device = choose_device(config, ranks)
        with stop_on_signals() as stop, process_group(ranks, device, config.timeout_minutes):
            run = set_up(config, ranks, device, run_dir)
            describe_run(run)
            return train(run, stop)
    except BaseException as error:
        if ranks.is_first:
            saved = list_checkpoints(run_dir / "checkpoints")
            code = BAD_INPUT if isinstance(error, InputError) else FAILED
            write_state(run_dir, "failed", code, saved[-1][0] if saved else 0)
        raise


def train(run: Run, stop: StopRequest) -> int:
    """All steps from the newest checkpoint on. Returns DONE or PREEMPTED; raises TrainingFailedError."""
    # --- where we are ---
    ranks, log_every = run.ranks, run.config.log.every_steps
    sums = LossSums(run.device)
    first_step = step = resume(run, sums)
    writer = _writer(run, first_step)
    flags, lines = Late(_HOST_DELAY), Late(_HOST_DELAY)
    failures = _Failures(run.config.loss.max_failed_steps)
    clock, saves = _Clock(run, first_step), _SaveTimes(run)
    stopping = False

    try:
        # --- steps ---
        loader = run.loader(first_step)
        for batch in loader:
            rate = run.schedule.learning_rate(batch.step)
            result = run.step(
                batch.views,
                run.permutations(batch.step),
                rate,
                stop=stop.asked,
                save=ranks.is_first and saves.minutes_due(),
            )
            sums.add(result)
            step = batch.step + 1

            # --- what the device says, two steps late ---
            clock.waited(batch.wait_seconds)
            flags.put(batch.step, result.flags)
            if step % log_every == 0 or step == run.schedule.total_steps:
                lines.put(clock.line(step, rate, len(loader.bad.ids)), sums.take(result.embeddings, ranks))
            save_now = saves.steps_due(step)
            for failed_step, (failed, stop_asked, save_asked) in flags.take():
                failures.count(failed_step, bool(failed))
                stopping |= bool(stop_asked)
                save_now |= bool(save_asked)
            _write(writer, lines.take())

            # --- save, stop ---
            if save_now or stopping or step == run.end_step:
                _write(writer, lines.take(everything=True))  # a resume after this step writes none of them again
                save(run, step, sums)
                saves.done()
            if stopping:
                break
    finally:
        if writer:
            writer.close()
    return _finish(run, step, preempted=stopping and step < run.end_step)


def _writer(run: Run, first_step: int) -> MetricsWriter | None:
    if not run.ranks.is_first:
        return None
    write_state(run.run_dir, "running", None, first_step)
    save_config(run.config, run.run_dir / "config.yaml")
    return MetricsWriter(run.run_dir, first_step, run.end_step, tensorboard=run.config.log.tensorboard)


def _write(writer: MetricsWriter | None, lines: list[tuple[Progressed, list[float]]]) -> None:
    for at, values in lines:
        if writer:
            writer.write(at, values)


def _finish(run: Run, step: int, *, preempted: bool) -> int:
    code = PREEMPTED if preempted else DONE
    status = "preempted" if preempted else "done" if step == run.schedule.total_steps else "paused"
    if run.ranks.is_first:
        write_state(run.run_dir, status, code, step)
        _log.info("%s after step %d of %d", status, step, run.schedule.total_steps)
    return code


class _Failures:
    """Counts steps in a row whose update was left out."""

    def __init__(self, most: int) -> None:
        self.most, self.in_a_row = most, 0

    def count(self, step: int, failed: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if failed else 0
        if failed:
            _log.warning("step %d: a slice could not be whitened, or the loss is not finite; no update was made", step)
        if self.in_a_row > self.most:
            raise TrainingFailedError(
                f"{self.in_a_row} steps in a row failed, the last {step}: the embeddings have collapsed or overflowed. "
                "Try a smaller optimizer.learning_rate, a longer warm-up, loss.eps 1e-4, or precision fp32; the last good "
                "checkpoint is untouched"
            )


class _Clock:
    """Rate and data wait since the last logged line."""

    def __init__(self, run: Run, first_step: int) -> None:
        self._run, self._step, self._since, self._wait = run, first_step, time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        self._wait += seconds

    def line(self, step: int, rate: float, bad_images: int) -> Progressed:
        seconds = time.perf_counter() - self._since
        views = (step - self._step) * self._run.config.data.images_per_step * self._run.config.views.num_views
        line = Progressed(
            step=step,
            epoch=step / self._run.planner.steps_per_epoch,
            learning_rate=rate,
            views_per_s=views / seconds,
            data_wait=self._wait / seconds,
            bad_images=bad_images,
        )
        self._step, self._since, self._wait = step, time.perf_counter(), 0.0
        return line


class _SaveTimes:
    """When a checkpoint is due, by steps (all ranks know) and by minutes (the first rank's clock, agreed in the step)."""

    def __init__(self, run: Run) -> None:
        self._config = run.config.checkpoint
        self.done()

    def done(self) -> None:
        self._since, self._asked = time.monotonic(), False

    def steps_due(self, step: int) -> bool:
        return self._config.every_steps > 0 and step % self._config.every_steps == 0

    def minutes_due(self) -> bool:
        minutes = self._config.every_minutes
        due = minutes > 0 and not self._asked and time.monotonic() - self._since >= 60 * minutes
        self._asked |= due
        return due
