"""Check and measure this project on one GPU: python -m tests.gpu OUT [--tiny] [--only NAME,...] [--seconds S]

OUT receives results.json (all figures, rewritten after every part), table.txt, and for each part its figures (NAME.json) and
its output (NAME.txt). The most useful parts run first. A part for which no time is left does not run and counts as failed; one
whose packages are missing is skipped. Exit code: 0 if no part failed, 1 if one did, 2 for a wrong command line or no GPU.

Needs torch, torchvision, timm, triton and numpy; what trains on images needs DALI as well, and some parts what `wmse` itself
needs. All parts together are stopped after 475 seconds, which should be enough for those without images; with DALI give 900, or
name parts by --only. WMSE_COMMIT names the commit of a copy without its history.
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
SKIPPED = 77  # exit code of a part that can't run here
PATIENCE = 3  # a rehearsal may take this many times as long: its machine may be busy
SAME_WHEN_TINY = ("compiled", "autotune")  # rehearsed by "budget" and "eager"
MODEL, IMAGES = "torch,torchvision,timm,numpy", "torch,torchvision,timm,numpy,PIL,nvidia.dali"
COMMAND = IMAGES + ",jsonargparse,yaml,rich"
TESTS = ("numerics/test_*_triton.py", "unit/test_saver.py", "data/test_gpu_*.py")


class Part(NamedTuple):
    """A subprocess of its own."""

    name: str
    seconds: int
    """It is stopped after so many; what it wrote by then counts."""
    needs: str
    """Modules, separated by commas."""
    command: list[str]
    """Arguments of Python."""


class Result(NamedTuple):
    """A line of the table."""

    part: str
    state: str
    seconds: int
    said: str


def parts(out: Path, work: Path, tiny: bool) -> list[Part]:
    """List all parts, the most useful ones first."""

    def own(name: str, seconds: int, needs: str, module: str, *words: str) -> Part:
        command = ["-m", f"tests.gpu.{module}", str(out / f"{name}.json"), *words, *(["--tiny"] if tiny else [])]
        return Part(name, seconds, needs, command)

    images = str(work / "images")
    backends = ["-m", "trainer.bench.whitening", "--seconds", "0.1" if tiny else "30"]
    backends += ["--out", str(out / "backends.json"), *(["--slices", "1", "--sizes", "4"] if tiny else [])]
    return [
        own("environment", 30, "torch", "environment"),
        own("compiled", 110, MODEL, "time_step", "compiled_bf16"),
        own("budget", 110, MODEL, "time_step", "compiled_bf16_budget"),
        own("whitening", 50, "torch,triton", "time_whitening"),
        own("autotune", 110, MODEL, "time_step", "autotuned_bf16_budget"),
        own("eager", 60, MODEL, "time_step", "eager_bf16", "eager_fp16"),
        own("optimizers", 40, MODEL + ",triton", "time_optimizers"),
        own("step", 75, MODEL, "check_step"),
        own("kernels", 100, "torch,triton,numpy", "check_kernels"),
        own("views", 60, IMAGES, "check_views"),
        Part("pictures", 60, IMAGES, ["-m", "tests.gpu.make_set", images, "48" if tiny else "2048"]),
        own("loader", 60, IMAGES, "time_images", "loader", images),
        own("end2end", 140, IMAGES, "time_images", "end2end", images),
        Part("run", 140, COMMAND, training_run(images, str(work / "run"), tiny)),
        Part("pytest", 200, COMMAND + ",triton,pytest,hypothesis", ["-m", "pytest", *tests(tiny)]),
        Part("backends", 80, "torch,triton", backends),
    ]


def training_run(images: str, run_dir: str, tiny: bool) -> list[str]:
    """Return the command of 200 steps of the ImageNet recipe."""
    run = ["-m", "trainer", "pretrain", "--config", "configs/imagenet_rn50_wmse4_100ep.yaml", "--run_dir", run_dir]
    run += ["--model.batch_norm_ranks", "local", "--log.tensorboard", "false", "--data.root", images]
    run += ["--data.images_per_step", "8" if tiny else "256", "--max_steps", "5" if tiny else "200"]
    if tiny:
        run += ["--model.backbone", "test_resnet", "--model.embedding_size", "4", "--wmse.slice_size", "8"]
        run += ["--views.size", "32", "--views.eval_resize", "32", "--data.threads", "1", "--device", "cpu"]
    return run


def tests(tiny: bool) -> list[str]:
    """Return the test files that a GPU should see."""
    if tiny:
        return ["tests/numerics/test_whitening_triton.py", "-k", "cannot_do"]
    return [str(path) for name in TESTS for path in sorted((ROOT / "tests").glob(name))]


def has_gpu() -> bool:
    """Return whether torch can use a GPU; without torch nobody knows, and each part says what is missing."""
    argv = [sys.executable, "-c", "import torch; torch.cuda.init()"]
    return not is_there("torch") or subprocess.call(argv, stderr=subprocess.DEVNULL) == 0


def is_there(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def run_part(part: Part, out: Path, limit: float) -> Result:
    """Run a part for at most `limit` seconds; its output goes to OUT/NAME.txt."""
    missing = [module for module in part.needs.split(",") if not is_there(module)]
    if missing:
        return Result(part.name, "skipped", 0, f"missing: {', '.join(missing)}")
    if limit < 5:
        return Result(part.name, "NOT RUN", 0, "no time is left")
    output, began = out / f"{part.name}.txt", time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
                process.wait()
    seconds = round(time.monotonic() - began)
    if code is None:
        return Result(part.name, "OVER TIME", seconds, f"stopped after {limit:.0f} s; {last_line(output)}")
    return Result(part.name, {0: "ok", SKIPPED: "skipped"}.get(code, f"FAILED ({code})"), seconds, last_line(output))


def last_line(path: Path) -> str:
    """Return the last line of a part's output."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def write(results: list[Result], out: Path) -> str:
    """Write results.json and table.txt of the results so far. Returns the table."""
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
    """Run one part after the other, whatever becomes of each. Returns the exit code."""
    results: list[Result] = []
    end = time.monotonic() + seconds
    for part in chosen:
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        for old in (out / f"{part.name}.json", out / f"{part.name}.txt"):
            old.unlink(missing_ok=True)
        results.append(run_part(part, out, min(part.seconds * patience, end - time.monotonic())))
        write(results, out)
    print(write(results, out), end="")
    return int(any(result.state not in ("ok", "skipped") for result in results))


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny sizes on the CPU, Triton interpreted")
    parser.add_argument("--only", metavar="NAME,...", help="only these parts")
    parser.add_argument("--seconds", type=float, default=475, help="in all; default 475")
    own = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as `wmse` does
    os.environ["PYTHONUNBUFFERED"] = "1"  # the output of a part that is stopped is kept
    if own.tiny:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        os.environ["ATEN_CPU_CAPABILITY"] = "default"  # plain C++ compiles faster than vectors
    elif not has_gpu():
        print("there is no GPU here; --tiny rehearses on a CPU", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work:
        out = own.out.resolve()
        every = parts(out, Path(work), own.tiny)
        default = [part.name for part in every if not (own.tiny and part.name in SAME_WHEN_TINY)]
        names = own.only.split(",") if own.only else default
        unknown = set(names) - {part.name for part in every}
        if unknown:
            parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in every)}")
        out.mkdir(parents=True, exist_ok=True)
        patience = PATIENCE if own.tiny else math.inf if own.only else 1  # a part that is named may take all the time
        return run_all([part for part in every if part.name in names], out, own.seconds, patience)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs as well
    sys.exit(main())
