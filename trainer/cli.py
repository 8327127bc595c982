"""wmse COMMAND ...: one small function a command. Each imports only what it runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import trainer
from trainer.config.names import closest
from trainer.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, InputError, exit_code_of
from trainer.run.signals import StopRequest

Words = Sequence[str]


def main(words: Words | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 bad input, 75 preempted."""
    from trainer.tools.terminal import lasting_stderr

    with lasting_stderr():
        return _main(words)


def _main(words: Words | None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return DONE if words else BAD_INPUT
    if words[0] == "--version":
        print(f"wmse {trainer.__version__}")
        return DONE
    # OpenMP threads that spin while they wait take cores away from DALI's threads; must be set before torch is loaded
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # DALI's decoder alone uses dozens of streams: with CUDA's 8 hardware queues unrelated work would wait in line
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        _check_own_packages()
        if words[0] not in COMMANDS:
            hint = closest(words[0], COMMANDS) or f"; there are: {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {words[0]!r}{hint}")
        return COMMANDS[words[0]](words[1:])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader of the output closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except OSError as error:
        if exit_code_of(error) != BAD_INPUT:
            raise
        from trainer.files import describe_os_error

        print(f"error: {describe_os_error(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("stopped at once", file=sys.stderr)
        return INTERRUPTED


def _overview() -> str:
    lines = [f"  {name:<11} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: wmse COMMAND ...   (wmse COMMAND --help tells more)", "", *lines])


def _check_own_packages() -> None:
    """Raise InputError if another package named `kernels`, which is a common name, was imported instead of ours."""
    import kernels

    ours, theirs = Path(trainer.__file__).parents[1], Path(kernels.__file__).parents[1]
    if ours != theirs:
        raise InputError(
            f"the package 'kernels' was imported from {theirs}, not from {ours}: uninstall the other one, or run in the "
            "virtual environment that `make` sets up"
        )


def _parser(command: Callable[[Words], int]) -> argparse.ArgumentParser:
    """The parser of a command, named and described after its function."""
    name = command.__name__.replace("_", "-")
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        f"wmse {name}", description=command.__doc__, allow_abbrev=False, formatter_class=formatter
    )


def _parse_with_settings(
    parser: argparse.ArgumentParser, words: Words, sub_parsers: Sequence[argparse.ArgumentParser] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into a command's own options and the rest, which are settings; --help lists both."""
    parsers = [parser, *sub_parsers]
    if "--help" in words or "-h" in words:
        from jsonargparse import ArgumentParser

        from trainer.config.loading import add_config_arguments

        settings = ArgumentParser(usage="settings, each as --section.key value:", add_help=False)
        add_config_arguments(settings)
        for each in parsers:
            each.formatter_class = argparse.RawDescriptionHelpFormatter
            each.epilog = settings.format_help().removeprefix("usage: ")
    own, rest = parser.parse_known_args(words)
    for name in (word.partition("=")[0] for word in rest if word.startswith("--")):
        meant = f"--{name[2:].replace('-', '_')}"
        if name != meant and any(meant in each._option_string_actions for each in parsers):
            raise InputError(f"unknown option {name}: did you mean {meant}?")
    return own, rest


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help="the experiment: YAML, or the name of a recipe in configs/; given again, a later file overrides those before it",
    )


def _number_of_ranks(own: argparse.Namespace) -> int:
    """The value of --ranks, 1 if it is not given. Raises InputError if it is below 1."""
    if own.ranks is not None and own.ranks < 1:
        raise InputError(f"--ranks is {own.ranks}: give at least 1")
    return own.ranks or 1


def pretrain(words: Words) -> int:
    """Pre-train an encoder by W-MSE; the same command resumes it."""
    parser = _parser(pretrain)
    _add_config(parser)
    parser.add_argument(
        "--dry_run", action="store_true", help="print what the run would do (steps, rate, slices, memory) and stop"
    )
    parser.add_argument("--ranks", type=int, metavar="R", help="number of ranks that the dry run assumes (default 1)")
    own, settings = _parse_with_settings(parser, words)
    from trainer.run.signals import stop_on_signals

    with stop_on_signals() as stop:  # before the imports that take seconds: a scheduler's signal may come at any time
        return _pretrain(own, settings, stop)


def _pretrain(own: argparse.Namespace, settings: Words, stop: StopRequest) -> int:
    from trainer.config.loading import load_settings

    config, sources = load_settings(own.config, settings)
    ranks = _number_of_ranks(own)
    if own.dry_run:
        from trainer.tools.dry_run import dry_run

        for line in dry_run(config, ranks):
            print(line, flush=True)
        return DONE
    if own.ranks is not None:
        raise InputError("--ranks is for --dry_run; start several ranks with torchrun --nproc_per_node or srun")
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.errors import TrainingFailedError
    from trainer.loop import pretrain as run

    try:
        # `record`: under torchrun the traceback of the first rank to fail then ends the job's log
        return int(record(run)(config, stop, sources) or DONE)
    except TrainingFailedError as error:
        logging.getLogger(__name__).error("%s", error)
        return FAILED


def launch(words: Words) -> int:
    """Start a pre-training run on all GPUs of this machine, or submit it to SLURM; checks everything first."""
    from trainer.cluster.cli import add_launch_arguments, run_launch

    parser = _parser(launch)
    add_launch_arguments(parser)
    own, rest = _parse_with_settings(parser, words)
    return run_launch(own, rest)


def stop(words: Words) -> int:
    """Save a checkpoint and stop a run for good, running or queued; it is not requeued."""
    parser = _parser(stop)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, or of an array's runs")
    parser.add_argument(
        "--wait_seconds", type=float, default=120.0, metavar="S", help="how long to wait for it to stop (default 120)"
    )
    own = parser.parse_args(words)
    from trainer.cluster.runs import find_runs
    from trainer.cluster.stop import stop_run

    for run_dir in find_runs([own.run_dir]):
        print(stop_run(run_dir, own.wait_seconds), flush=True)
    return DONE


def preview(words: Words) -> int:
    """Draw images and their views, as the model sees them, into a PNG."""
    parser = _parser(preview)
    _add_config(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("preview.png"), metavar="PNG", help="file to write (default preview.png)"
    )
    parser.add_argument("--images", type=int, default=8, metavar="N", help="number of images, one a row (default 8)")
    own, settings = _parse_with_settings(parser, words)
    from trainer.config.loading import load_config
    from trainer.tools.preview import write_preview

    print(write_preview(load_config(own.config, settings, check_method=False), own.images, own.out))
    return DONE


def _evaluation(command: Callable[[Words], int], words: Words, measures: Words) -> int:
    from trainer.evaluate.cli import add_evaluation_arguments, evaluate_run

    parser = _parser(command)
    add_evaluation_arguments(parser)
    own, settings = _parse_with_settings(parser, words)
    return evaluate_run(own, settings, measures)


def probe(words: Words) -> int:
    """Measure a run's encoder by the linear probe, on raw and on standardised features."""
    return _evaluation(probe, words, ["linear"])


def knn(words: Words) -> int:
    """Measure a run's encoder by its nearest neighbours."""
    return _evaluation(knn, words, ["knn"])


def evaluate(words: Words) -> int:
    """Measure both as probe and knn do, on features computed once."""
    return _evaluation(evaluate, words, ["linear", "knn"])


def status(words: Words) -> int:
    """Show where runs stand: state, step, rate, loss, SLURM job, last evaluation."""
    parser = _parser(status)
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="run folders, or folders of run folders (default: all in ./runs)",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of the table")
    own = parser.parse_args(words)
    from trainer.cluster.status import show_status

    show_status(own.runs, as_json=own.json)
    return DONE


def prepare(words: Words) -> int:
    """Make tar shards with an index from an image folder or a named set."""
    from trainer.data.cli import add_prepare_arguments, run_prepare

    parser = _parser(prepare)
    add_prepare_arguments(parser)
    return run_prepare(parser.parse_args(words))


def check_data(words: Words) -> int:
    """Decode every image that training would read and name each that it can't; exit code 1 if there is one."""
    from trainer.data.cli import add_check_arguments, run_check

    parser = _parser(check_data)
    add_check_arguments(parser)
    return run_check(parser.parse_args(words))


def bench(words: Words) -> int:
    """Measure: loss, loader, compute, end2end, checkpoint, growth, or all of a training. JSON on the last line."""
    from trainer.bench.cli import add_arguments, run_bench

    parser = _parser(bench)
    kinds = add_arguments(parser)
    own, settings = _parse_with_settings(parser, words, kinds)
    return run_bench(own, settings)


def demo(words: Words) -> int:
    """Train on real images in minutes, measure what was learnt, end with a table and a picture."""
    from trainer.tools.demo import add_arguments, run_demo

    parser = _parser(demo)
    add_arguments(parser)
    own, settings = _parse_with_settings(parser, words)
    return run_demo(own.run_dir, own.seed, settings)


COMMANDS: dict[str, Callable[[Words], int]] = {
    "pretrain": pretrain,
    "launch": launch,
    "stop": stop,
    "probe": probe,
    "knn": knn,
    "evaluate": evaluate,
    "status": status,
    "prepare": prepare,
    "check-data": check_data,
    "preview": preview,
    "bench": bench,
    "demo": demo,
}
