"""Command line `wmse COMMAND ...`, with a function for each command. Each function only imports what it needs."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import trainer
from trainer.config.names import SHORT_NAMES, closest
from trainer.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, InputError, exit_code_of
from trainer.run.signals import StopRequest
from trainer.tools.parsing import Words, add_config, command_parser, parse_with_settings, with_underscores


def main(words: Words | None = None) -> int:
    """Run a command. Returns the exit code: 0 done, 1 failed, 2 bad input, 75 preempted, 130 interrupted."""
    from trainer.tools.terminal import lasting_stderr

    with lasting_stderr():
        return _main(words)


def _main(words: Words | None) -> int:
    words = [with_underscores(word) for word in (sys.argv[1:] if words is None else words)]
    if "_ARGCOMPLETE" in os.environ:
        from trainer.tools.completion import complete_command, typed_words

        words = typed_words()
        if len(words) < 2 or words[0] not in COMMANDS:
            complete_command(COMMANDS)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return DONE if words else BAD_INPUT
    if words[0] == "--version":
        from trainer.run.machine import describe_program

        print(describe_program(trainer.__version__))
        return DONE
    # At exit, Python would search all objects of torch for garbage. That takes a second or two and frees nothing in time.
    atexit.register(gc.freeze)
    # OpenMP threads that spin while they wait take cores away from the threads of DALI. Set this before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The decoder of DALI uses dozens of streams. With the default of 8 hardware queues, unrelated work would wait for it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        _check_own_packages()
        if words[0] not in COMMANDS:
            hint = closest(words[0], COMMANDS) or f": choose one of {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {words[0]!r}{hint}")
        return COMMANDS[words[0]](words[1:])
    # An error that the user can fix is one line. Any other exception is a bug and keeps its traceback.
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        # Python flushes stdout at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except OSError as error:
        if exit_code_of(error) != BAD_INPUT:
            raise
        from trainer.files import describe_os_error

        print(f"error: {describe_os_error(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _overview() -> str:
    """List the commands by group, with the first line of their docstrings."""
    lines = ["usage: wmse COMMAND ...   (see wmse COMMAND --help)"]
    for title, commands in _GROUPS.items():
        lines += ["", f"{title}:"]
        for name, command in commands.items():
            summary = (command.__doc__ or "").splitlines()[0]
            lines.append(f"  {name:<11} {summary}")
    return "\n".join(lines)


def _check_own_packages() -> None:
    """Raise InputError if another package with the common name `kernels` was imported instead of ours."""
    import kernels

    # Both packages are in one folder, in a checkout as well as in an installation.
    ours = Path(trainer.__file__).parents[1]
    theirs = Path(kernels.__file__).parents[1]
    if ours != theirs:
        raise InputError(
            f"the package 'kernels' was imported from {theirs}, not from {ours}: uninstall the other one, or run in the "
            "virtual environment that `make` sets up"
        )


def _number_of_ranks(own: argparse.Namespace) -> int:
    """Return the value of --ranks, or 1 without this option. Raises InputError if it is below 1."""
    if own.ranks is not None and own.ranks < 1:
        raise InputError(f"--ranks is {own.ranks}: give at least 1")
    return own.ranks or 1


def _run(
    command: Callable[[Words], int],
    words: Words,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> int:
    """Run a command that takes no settings. Returns its exit code."""
    parser = command_parser(command)
    add_arguments(parser)
    return run(parser.parse_args(words))


def pretrain(words: Words) -> int:
    """Pre-train an encoder, or resume the run; both take the same command."""
    parser = command_parser(pretrain)
    add_config(parser)
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print the plan of the run (steps, learning rate, slices, memory) without starting it",
    )
    parser.add_argument("--ranks", type=int, metavar="R", help="number of ranks that the dry run assumes (default 1)")
    own, settings = parse_with_settings(parser, words)
    from trainer.run.signals import stop_on_signals

    # Handle signals before the imports, which take seconds: a scheduler may send a signal at any time.
    with stop_on_signals() as stop:
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
    # A real run gets its ranks from the launcher.
    if own.ranks is not None:
        raise InputError(
            "--ranks only applies to --dry_run: start several ranks with torchrun --nproc_per_node or srun"
        )
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.errors import TrainingFailedError
    from trainer.loop import pretrain as run

    try:
        # `record` makes torchrun end the log of the job with the traceback of the rank that failed first.
        return int(record(run)(config, stop, sources) or DONE)
    except TrainingFailedError as error:
        logging.getLogger(__name__).error("%s", error)
        return FAILED


def launch(words: Words) -> int:
    """Check a pre-training run, then start it on all GPUs of this machine or submit it to SLURM."""
    from trainer.cluster.cli import add_launch_arguments, run_launch

    parser = command_parser(launch)
    add_launch_arguments(parser)
    own, rest = parse_with_settings(parser, words)
    return run_launch(own, rest)


def sweep(words: Words) -> int:
    """Train and evaluate a table of experiments, here or on SLURM, and write it with mean and spread over seeds."""
    from trainer.sweep.cli import add_sweep_arguments, run_sweep

    parser = command_parser(sweep)
    add_sweep_arguments(parser)
    has_file = bool(words) and not words[0].startswith("-")
    file = Path(words[0]) if has_file else None
    own, rest = parse_with_settings(parser, words[1:] if has_file else words)
    return run_sweep(file, own, rest)


def reproduce(words: Words) -> int:
    """Train and evaluate a recipe, and say whether its published figures were reached. The exit code is 1 if not."""
    from trainer.reproduce.cli import add_reproduce_arguments, run_reproduce

    parser = command_parser(reproduce)
    add_reproduce_arguments(parser)
    has_file = bool(words) and not words[0].startswith("-")
    file = Path(words[0]) if has_file else None
    own, settings = parse_with_settings(parser, words[1:] if has_file else words)
    return run_reproduce(file, own, settings)


def stop(words: Words) -> int:
    """Save a checkpoint of a run, and stop it for good. It is not requeued."""
    parser = command_parser(stop)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder, or folder with the runs of an array")
    parser.add_argument(
        "--wait_seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds to wait for the run to stop (default 120)",
    )
    own = parser.parse_args(words)
    from trainer.cluster.runs import find_runs
    from trainer.cluster.stop import stop_run

    for run_dir in find_runs([own.run_dir]):
        print(stop_run(run_dir, own.wait_seconds), flush=True)
    return DONE


def preview(words: Words) -> int:
    """Draw images and their views, as the encoder sees them, to a PNG file."""
    parser = command_parser(preview)
    add_config(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("preview.png"), metavar="PNG", help="file to write (default preview.png)"
    )
    parser.add_argument(
        "--images", type=int, default=8, metavar="N", help="number of images, each in one row (default 8)"
    )
    own, settings = parse_with_settings(parser, words)
    from trainer.config.loading import load_config
    from trainer.tools.preview import write_preview

    # A preview computes no loss, so the global batch size need not fit the method.
    config = load_config(own.config, settings, check_method=False)
    print(write_preview(config, own.images, own.out))
    return DONE


def _evaluation(command: Callable[[Words], int], words: Words, protocols: Words | None) -> int:
    from trainer.evaluate.cli import add_evaluation_arguments, evaluate_run

    parser = command_parser(command)
    add_evaluation_arguments(parser)
    # argparse would take the value of a setting for the run, so a run without --run_dir must come first.
    if words and not words[0].startswith("-"):
        words = ["--run_dir", *words]
    own, settings = parse_with_settings(parser, words)
    return evaluate_run(own, settings, protocols)


def probe(words: Words) -> int:
    """Measure the encoder of a run by the linear probe, on raw and on standardised features."""
    return _evaluation(probe, words, ["linear"])


def knn(words: Words) -> int:
    """Measure the encoder of a run by k-nearest neighbours (k-NN)."""
    return _evaluation(knn, words, ["knn"])


def evaluate(words: Words) -> int:
    """Measure the encoder of a run by the protocols of evaluate.protocols, with features that are computed once."""
    return _evaluation(evaluate, words, None)


def export(words: Words) -> int:
    """Write the encoder of a run for timm, torchvision or ONNX runtimes."""
    from trainer.export.cli import add_export_arguments, run_export

    return _run(export, words, add_export_arguments, run_export)


def features(words: Words) -> int:
    """Write the features of a folder of images, by an encoder of this or another program."""
    from trainer.export.cli import add_features_arguments, run_features

    return _run(features, words, add_features_arguments, run_features)


def status(words: Words) -> int:
    """Show the status of runs: state, step, speed, loss, SLURM job, last evaluation."""
    parser = command_parser(status)
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="run folders, or folders of run folders (default: all in ./runs)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    own = parser.parse_args(words)
    from trainer.cluster.status import show_status

    show_status(own.runs, as_json=own.json)
    return DONE


def report(words: Words) -> int:
    """Write one HTML page with the curves, figures and pictures of runs."""
    from trainer.report.cli import add_report_arguments, run_report

    return _run(report, words, add_report_arguments, run_report)


def plan(words: Words) -> int:
    """Print what a step trains on: its images, every random choice of their views, slices and learning rate."""
    parser = command_parser(plan)
    add_config(parser)
    parser.add_argument("--step", type=int, required=True, metavar="S", help="step, counted from 0")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank whose rows are shown (with --ranks)")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default 1: all rows of the step)")
    parser.add_argument(
        "--images", type=int, default=0, metavar="N", help="number of training images, instead of opening them"
    )
    parser.add_argument("--rows", default="", metavar="FIRST:LAST", help="rows to show (default: the first 8)")
    parser.add_argument("--json", action="store_true", help="print JSON lines: the step, its rows, its slices")
    own, settings = parse_with_settings(parser, words)
    from trainer.config.loading import load_config
    from trainer.distributed.ranks import Ranks
    from trainer.tools.step_plan import plan_lines_of_step

    world_size = _number_of_ranks(own)
    if not 0 <= own.rank < world_size or own.images < 0:
        raise InputError(
            f"--rank is {own.rank} of {world_size}, --images {own.images}: give 0 <= R < N and N > 0 images"
        )
    config = load_config(own.config, settings)
    ranks = Ranks(own.rank, world_size)
    for line in plan_lines_of_step(config, own.step, ranks, num_images=own.images, rows=own.rows, as_json=own.json):
        print(line)
    return DONE


def diff(words: Words) -> int:
    """Say where two runs part: settings, versions, images, steps, rows and weights. The exit code is 1 if they do."""
    from trainer.diff.cli import add_diff_arguments, run_diff

    return _run(diff, words, add_diff_arguments, run_diff)


def prepare(words: Words) -> int:
    """Write tar shards with an index from an image folder or a named data set."""
    from trainer.data.cli import add_prepare_arguments, run_prepare

    return _run(prepare, words, add_prepare_arguments, run_prepare)


def check_data(words: Words) -> int:
    """Decode every image of a data set, and list the unusable ones. The exit code is 1 if it finds any."""
    from trainer.data.cli import add_check_arguments, run_check

    return _run(check_data, words, add_check_arguments, run_check)


def settings(words: Words) -> int:
    """Explain the settings of a section, or one setting: values, default, and what it does."""
    parser = command_parser(settings)
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="section, or setting such as wmse.eps")
    parser.add_argument("--markdown", action="store_true", help="print docs/config.md")
    own = parser.parse_args(words)
    from trainer.config.help import sections, settings_page, settings_text

    if own.markdown:
        print(settings_page(), end="")
    elif own.name:
        # The help shows names with dashes, and short ones.
        name = own.name.lstrip("-").replace("-", "_")
        print(settings_text(SHORT_NAMES.get(name, name)))
    else:
        print("\n".join(f"  {name:<15} {text}" for name, text in sections().items()))
    return DONE


def completion(words: Words) -> int:
    """Print the script that completes commands and options in bash or zsh."""
    parser = command_parser(completion)
    parser.add_argument(
        "shell", choices=("bash", "zsh"), help='for bash, add to ~/.bashrc: eval "$(wmse completion bash)"'
    )
    own = parser.parse_args(words)
    import argcomplete

    print(argcomplete.shellcode(["wmse"], shell=own.shell))
    return DONE


def bench(words: Words) -> int:
    """Measure the speed of loss, loader, compute, methods, end2end, checkpoint, growth or all. Prints JSON on the last line."""
    from trainer.bench.cli import add_arguments, run_bench

    parser = command_parser(bench)
    kinds = add_arguments(parser)
    own, settings = parse_with_settings(parser, words, kinds)
    return run_bench(own, settings)


def tune(words: Words) -> int:
    """Check and time the choices that change the speed of an experiment on this device, and write a file of settings."""
    from trainer.tune.cli import add_arguments, run_tune

    parser = command_parser(tune)
    add_arguments(parser)
    own, settings = parse_with_settings(parser, words)
    return run_tune(own, settings)


def verify(words: Words) -> int:
    """Check losses, gradients, ranks, views, kernels and figures on this machine. The exit code is 1 if a check fails."""
    from trainer.verify.cli import add_verify_arguments, run_verify

    return _run(verify, words, add_verify_arguments, run_verify)


def drill(words: Words) -> int:
    """Kill, suspend and preempt a toy run on this machine, damage its files, and show how each run ends."""
    from trainer.drill.cli import add_drill_arguments, run_drill

    return _run(drill, words, add_drill_arguments, run_drill)


def demo(words: Words) -> int:
    """Train on real images for some minutes, evaluate the encoder, and end with a table and a page of plots."""
    from trainer.tools.demo import add_arguments, run_demo

    parser = command_parser(demo)
    add_arguments(parser)
    own, settings = parse_with_settings(parser, words)
    return run_demo(own.run_dir, own.seed, settings)


_GROUPS: dict[str, dict[str, Callable[[Words], int]]] = {
    "train": {
        "pretrain": pretrain,
        "launch": launch,
        "sweep": sweep,
        "reproduce": reproduce,
        "status": status,
        "stop": stop,
    },
    "measure and use the encoder": {
        "probe": probe,
        "knn": knn,
        "evaluate": evaluate,
        "report": report,
        "export": export,
        "features": features,
    },
    "prepare and look at images": {"prepare": prepare, "check-data": check_data, "preview": preview},
    "check and compare": {"verify": verify, "drill": drill, "plan": plan, "diff": diff, "bench": bench, "tune": tune},
    "help": {"demo": demo, "settings": settings, "completion": completion},
}
COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
