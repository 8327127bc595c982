"""Check and measure this project on one GPU: python -m tests.gpu OUT [--tiny] [--only NAME,...] [--seconds S]

OUT receives results.json (all figures, rewritten after every part), table.txt, and for each part its figures (NAME.json) and
its output (NAME.txt). The most useful parts run first. A part for which no time is left does not run and counts as failed; one
whose packages are missing is skipped. Exit code: 0 if no part failed, 1 if one did, 2 for a wrong command line or no GPU.

This needs torch, torchvision, timm, triton and numpy. Parts that train on images need DALI as well, and some parts need all
packages of `wmse`. All parts together stop after 475 seconds, which should be enough for the parts without images; with DALI
give 900, or name parts by --only. WMSE_COMMIT names the commit of a copy without its history.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SKIPPED = 77  # exit code of a part that cannot run on this machine
PATIENCE = 3  # factor on the time limits of a rehearsal, whose machine may be busy
SAME_WHEN_TINY = ("compiled", "autotune")  # not rehearsed: "budget" and "eager" run the same code
# Modules that the parts need.
MODEL = "torch,torchvision,timm,numpy"
IMAGES = MODEL + ",PIL,nvidia.dali"
COMMAND = IMAGES + ",jsonargparse,yaml,rich"
TESTS = ("numerics/test_*_triton.py", "unit/test_saver.py", "data/test_gpu_*.py")


class Part(NamedTuple):
    """A part of the checks, which runs as a subprocess."""

    name: str
    seconds: int
    """Time limit. What the part has written until then is kept."""
    needs: str
    """Modules that the part needs, separated by commas."""
    command: list[str]
    """Arguments of Python."""


class Result(NamedTuple):
    """The outcome of a part, a line of the table."""

    part: str
    state: str
    seconds: int
    said: str


def parts(out: Path, work: Path, tiny: bool) -> list[Part]:
    """List all parts, the most useful ones first."""

    def own(name: str, seconds: int, needs: str, module: str, *words: str) -> Part:
        command = ["-m", f"tests.gpu.{module}", str(out / f"{name}.json"), *words]
        if tiny:
            command.append("--tiny")
        return Part(name, seconds, needs, command)

    # "pictures" draws the images that the parts after it train on.
    images = str(work / "images")
    return [
        own("environment", 30, "torch", "environment"),
        own("compiled", 110, MODEL, "time_step", "compiled_bf16"),
        own("budget", 110, MODEL, "time_step", "compiled_bf16_budget"),
        own("whitening", 50, "torch,triton", "time_whitening"),
        own("autotune", 110, MODEL, "time_step", "autotuned_bf16_budget"),
        own("eager", 60, MODEL, "time_step", "eager_bf16", "eager_fp16"),
        own("batch_norm", 120, MODEL + ",triton", "time_step", "compiled_bf16_kernels", "eager_bf16_kernels"),
        own("optimizers", 40, MODEL + ",triton", "time_optimizers"),
        own("step", 75, MODEL, "check_step"),
        own("kernels", 100, "torch,triton,numpy", "check_kernels"),
        own("views", 60, IMAGES, "check_views"),
        Part("pictures", 60, IMAGES, ["-m", "tests.gpu.make_set", images, "48" if tiny else "2048"]),
        own("loader", 80, IMAGES, "time_images", "loader", images),
        own("end2end", 140, IMAGES, "time_images", "end2end", images),
        Part("run", 140, COMMAND, training_run(images, str(work / "run"), tiny)),
        Part("tune", 280, COMMAND + ",triton", tuning(out / "tuned.yaml", images, tiny)),
        Part("pytest", 200, COMMAND + ",triton,pytest,hypothesis", ["-m", "pytest", *tests(tiny)]),
    ]


def tuning(out: Path, images: str, tiny: bool) -> list[str]:
    """Return the command that tunes the ImageNet recipe on one GPU."""
    command = ["-m", "trainer", "tune", "--config", "configs/imagenet_rn50_wmse4_100ep.yaml", "--out", str(out)]
    command += ["--minutes", "0.1" if tiny else "4", "--data.root", images, *sizes_of_a_run(tiny)]
    return command


def training_run(images: str, run_dir: str, tiny: bool) -> list[str]:
    """Return the command that trains the ImageNet recipe for 200 steps."""
    run = ["-m", "trainer", "pretrain", "--config", "configs/imagenet_rn50_wmse4_100ep.yaml", "--run_dir", run_dir]
    run += ["--log.tensorboard", "false", "--data.root", images, "--max_steps", "5" if tiny else "200"]
    return [*run, *sizes_of_a_run(tiny)]


def sizes_of_a_run(tiny: bool) -> list[str]:
    """Return the settings of one GPU, or of the rehearsal."""
    sizes = ["--model.batch_norm_ranks", "local", "--data.images_per_step", "8" if tiny else "256"]
    if tiny:
        sizes += ["--model.backbone", "test_resnet", "--model.embedding_size", "4", "--wmse.slice_size", "8"]
        sizes += ["--views.size", "32", "--views.eval_resize", "32", "--data.threads", "1", "--device", "cpu"]
    return sizes


def tests(tiny: bool) -> list[str]:
    """Return the arguments of pytest: the test files that use a GPU."""
    if tiny:
        return ["tests/numerics/test_whitening_triton.py", "-k", "cannot_do"]
    files = []
    for pattern in TESTS:
        paths = sorted((ROOT / "tests").glob(pattern))
        files += [str(path) for path in paths]
    return files


def has_gpu() -> bool:
    """Return whether torch can use a GPU; True without torch, because then each part reports what is missing."""
    if not is_installed("torch"):
        return True
    # Ask in another process, so that this one does not use the GPU.
    argv = [sys.executable, "-c", "import torch; torch.cuda.init()"]
    return subprocess.call(argv, stderr=subprocess.DEVNULL) == 0


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False


def run_part(part: Part, out: Path, limit: float) -> Result:
    """Run a part for at most `limit` seconds and write its output to OUT/NAME.txt."""
    missing = [module for module in part.needs.split(",") if not is_installed(module)]
    if missing:
        return Result(part.name, "skipped", 0, f"missing: {', '.join(missing)}")
    if limit < 5:
        return Result(part.name, "NOT RUN", 0, "no time is left")
    output = out / f"{part.name}.txt"
    began = time.monotonic()
    with output.open("wb") as file:
        # A session of the part's processes, so that all of them can be killed together.
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = round(time.monotonic() - began)
    if code is None:
        return Result(part.name, "OVER TIME", seconds, f"stopped after {limit:.0f} s; {last_line(output)}")
    state = {0: "ok", SKIPPED: "skipped"}.get(code, f"FAILED ({code})")
    return Result(part.name, state, seconds, last_line(output))


def last_line(path: Path) -> str:
    """Return the last line of a part's output that is not empty."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def write(results: list[Result], out: Path) -> str:
    """Write results.json and table.txt with the results so far. Returns the table."""
    found = {}
    for result in results:
        path = out / f"{result.part}.json"
        figures = json.loads(path.read_text()) if path.exists() else {}
        found[result.part] = {"state": result.state, "seconds": result.seconds, "said": result.said, **figures}
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    rows = [("part", "result", "s", "what it says"), *results]
    table = "".join(f"{part:<12} {state:<12} {seconds:>4}  {said}\n" for part, state, seconds, said in rows)
    (out / "table.txt").write_text(table)
    return table


def run_all(chosen: list[Part], out: Path, seconds: float, patience: float = 1) -> int:
    """Run all parts in turn, even if some fail. Returns the exit code."""
    results: list[Result] = []
    end = time.monotonic() + seconds
    for part in chosen:
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        # An earlier start may have left files of the same names.
        for old in (out / f"{part.name}.json", out / f"{part.name}.txt"):
            old.unlink(missing_ok=True)
        time_left = end - time.monotonic()
        limit = min(part.seconds * patience, time_left)
        results.append(run_part(part, out, limit))
        write(results, out)
    print(write(results, out), end="")
    return int(any(result.state not in ("ok", "skipped") for result in results))


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the results; it is created")
    parser.add_argument(
        "--tiny", action="store_true", help="rehearse with tiny sizes on the CPU, with interpreted Triton kernels"
    )
    parser.add_argument("--only", metavar="NAME,...", help="run only these parts")
    parser.add_argument("--seconds", type=float, default=475, help="time for all parts together (default 475)")
    own = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as `wmse` does
    os.environ["PYTHONUNBUFFERED"] = "1"  # keeps the output of a part that is stopped
    if own.tiny:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        os.environ["ATEN_CPU_CAPABILITY"] = "default"  # plain C++ compiles faster than vectors
    elif not has_gpu():
        print("torch finds no GPU on this machine; --tiny rehearses on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work:
        out = own.out.resolve()
        every = parts(out, Path(work), own.tiny)
        default = [part.name for part in every if not (own.tiny and part.name in SAME_WHEN_TINY)]
        names = own.only.split(",") if own.only else default
        unknown = set(names) - {part.name for part in every}
        if unknown:
            known = ", ".join(part.name for part in every)
            parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {known}")
        out.mkdir(parents=True, exist_ok=True)
        # A part that the user names may take all the time.
        patience = math.inf if own.only else 1
        if own.tiny:
            patience = PATIENCE
        chosen = [part for part in every if part.name in names]
        return run_all(chosen, out, own.seconds, patience)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit also ends the running part
    sys.exit(main())
