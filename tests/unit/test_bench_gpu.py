"""The script for a GPU machine: its quickest parts are rehearsed, and what it would say of faults is seen here.

Where a part needs CUDA, stand-ins show that its checks can fail; all parts: tests/gpu/run.sh OUT --tiny.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from kernels.whitening import WhiteningStatus, whiten, whiten_with_status
from tests.conftest import ROOT
from tests.gpu import check_kernels, check_step, check_views, profile_loss, time_whitening
from tests.gpu.check_step import Variant
from tests.gpu.part import Part

CPU = torch.device("cpu")
VARIANT = {"torch": {"backend": "torch"}}


def bash(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(["bash", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def table_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Part -> its state and what it said."""
    lines = [line for line in done.stdout.splitlines()[1:-1] if line]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_the_quickest_part_rehearsed_by_the_script(tmp_path: Path) -> None:
    done = bash("tests/gpu/run.sh", str(tmp_path / "out"), "--tiny", "--only", "environment")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(table_of(done)) == {"environment"}
    assert table_of(done)["environment"].startswith("ok ")
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert "torch" not in environment["missing"]
    assert (tmp_path / "out" / "table.txt").read_text() == done.stdout
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == {"environment": environment}


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU run.sh itself is run")
def test_two_more_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "figures.json"
    assert time_whitening.run(Part(out, CPU, tiny=True)) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert set(result["figures"]) == {*time_whitening.VARIANTS, "loop"}
    assert profile_loss.run(Part(out, CPU, tiny=True)) == 0
    assert [found["backend"] for found in json.loads(out.read_text())["results"]] == ["triton", "torch"]
    assert "aten::index_select" in capsys.readouterr().out


def test_a_part_that_fails_stops_no_other_and_is_told(tmp_path: Path) -> None:
    script = f"""
out={tmp_path} python=python3 only={{only}} end_seconds={{seconds}}
source tests/gpu/parts.sh
part bad 9 - sh -c 'echo why; echo {{{{}}}}; exit 3'
part slow 1 - sleep 9
part absent 9 torch,no_such_module,no.such.part false
part elsewhere 9 - sh -c 'echo needs a GPU; exit 77'
part good 9 json sh -c 'echo first; echo last'
finish
"""
    done = bash("-c", script.format(only="", seconds=99))
    assert done.returncode == 1
    said = {name: " ".join(words.split()) for name, words in table_of(done).items()}
    assert said["bad"].startswith("FAILED (3) ")
    assert said["bad"].endswith("why")
    assert said["slow"].startswith("OVER TIME 1 stopped after 1 s")
    assert said["absent"].startswith("skipped 0 missing: ")
    assert "no_such_module, no.such.part" in said["absent"]
    assert said["elsewhere"].startswith("skipped ")
    assert said["good"].startswith("ok ")
    assert said["good"].endswith("last")
    assert (tmp_path / "good.txt").read_text() == "first\nlast\n"
    assert bash("-c", script.format(only="good,elsewhere", seconds=99)).returncode == 0
    done = bash("-c", script.format(only="good,goood", seconds=99))
    assert done.returncode == 1
    assert "there is no such part; there are: bad slow" in table_of(done)["goood"]
    done = bash("-c", script.format(only="good", seconds=3))
    assert done.returncode == 1
    assert table_of(done)["good"].startswith("NOT RUN")


@pytest.mark.parametrize("words", [[], ["--only"], ["out", "more"], ["out", "--seconds", "x"], ["--tinny"]])
def test_wrong_words_are_answered_with_the_usage(words: list[str], tmp_path: Path) -> None:
    done = bash(str(ROOT / "tests/gpu/run.sh"), *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "tests/gpu/run.sh OUT [--tiny]" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path) -> None:
    done = bash("tests/gpu/run.sh", str(tmp_path))
    assert done.returncode == 2
    assert "--tiny rehearses on a CPU" in done.stderr


def wrong_value(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) * (1 + 1e-5)


def wrong_gradient(x: Tensor, **keywords: Any) -> Tensor:
    z = whiten(x, **keywords)
    z.register_hook(lambda gradient: gradient * (1 + 1e-5))
    return z


def nan(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) * float("nan")


def refuses(x: Tensor, **keywords: Any) -> Tensor:
    raise RuntimeError("cannot\nat all")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (whiten, ""),
        (wrong_value, "above"),
        (wrong_gradient, "above"),
        (nan, "above"),
        (refuses, "RuntimeError: cannot"),
    ],
)
def test_errors_of_value_and_gradient_are_noticed(
    function: Callable[..., Tensor], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "whiten", function)
    lines = list(check_kernels.accuracy(CPU, [(2, 33, 16)], []))
    assert len(lines) == 2
    assert all(bool(line.problem) == bool(problem) and problem in line.problem for line in lines)


def leaves_the_bad(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) + x * torch.tensor([0, 1, 0])[:, None, None]


def harms_the_good(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) * (1 + x[1].nan_to_num().square().mean())


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (whiten, ""),
        (leaves_the_bad, "z of the bad slice is not 0"),
        (harms_the_good, "z of a good slice changed"),
    ],
)
def test_harm_of_failed_slices_is_noticed(
    function: Callable[..., Tensor], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "whiten", function)
    (line,) = check_kernels.failed_slices(CPU, [(3, 19, 17)], [("nan", 0.0)])
    assert line.problem == problem


def test_a_wrong_status_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_well(x: Tensor, **keywords: Any) -> tuple[Tensor, WhiteningStatus]:
        z, status = whiten_with_status(x, **keywords)
        return z, status._replace(ok=torch.ones_like(status.ok))

    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "whiten_with_status", all_well)
    (line,) = check_kernels.failed_slices(CPU, [(3, 19, 17)], [("nan", 0.0)])
    assert line.problem.startswith("status says ok [True, True, True]")


@pytest.mark.parametrize("replays", [True, False])
def test_a_graph_that_does_not_follow_its_input_is_noticed(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for CUDA: a graph that calls the step again, or does nothing; a debug mode that objects."""

    def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
        returned = step()

        def replay() -> None:
            for old, new in zip(returned, step(), strict=True):
                old.copy_(new)

        return SimpleNamespace(replay=replay if replays else lambda: None), returned

    def object_to_waiting(mode: str) -> None:
        if mode == "error" and not replays:
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "capture", capture)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", object_to_waiting)
    waits, graph = check_kernels.waiting_and_graphs(CPU)
    assert bool(graph.problem) != replays
    assert waits.problem == ("" if replays else "RuntimeError: called a synchronizing CUDA operation")


def test_targets() -> None:
    def figures(graph: float, loop: float) -> time_whitening.Figures:
        return {
            "torch": {"graph": {"median": 999.0}},
            "triton": {"graph": {"median": graph}},
            "loop": {"eager": {"median": loop}},
        }

    assert time_whitening.judge(4, figures(149, 3000)) == ("4 slices: triton 149 us, loop 20 times that", [])
    slow, few_times = time_whitening.judge(64, figures(401, 7900))[1]
    assert slow.endswith("the target is 400 us")
    assert few_times.endswith("the target is 20 times")


def event(name: str, start: int, end: int, kind: DeviceType = DeviceType.CPU, annotation: bool = False) -> Any:
    said = {"name": name, "start_ns": start, "end_ns": end, "duration_ns": end - start, "device_type": kind}
    return SimpleNamespace(**{k: lambda v=v: v for k, v in {**said, "is_user_annotation": annotation}.items()})


EVENTS = [
    event("cudaStreamSynchronize", 0, 9),  # before the step
    event(profile_loss.MARK, 10, 100, annotation=True),
    event("cudaLaunchKernel", 20, 21),
    event("cudaMemcpyAsync", 30, 31),
    event("factor", 40, 3040, DeviceType.CUDA),
    event("apply", 50, 1050, DeviceType.CUDA),
    event("apply", 60, 5060, DeviceType.CUDA),
    event(profile_loss.MARK, 40, 5060, DeviceType.CUDA, annotation=True),
    event("cudaDeviceSynchronize", 100, 200),  # after it
]
WAITS = event("cudaStreamSynchronize", 90, 95)


def test_what_waits_inside_the_step_is_found_and_kernels_are_added_up() -> None:
    assert profile_loss.waiting_calls(EVENTS) == []
    assert profile_loss.waiting_calls([*EVENTS, WAITS, event("cudaMemcpy", 96, 97)]) == [WAITS.name(), "cudaMemcpy"]
    assert profile_loss.kernel_times(EVENTS, DeviceType.CUDA) == [
        {"name": "apply", "calls": 2, "microseconds": 6.0},
        {"name": "factor", "calls": 1, "microseconds": 3.0},
    ]


@pytest.mark.parametrize(
    ("step_waits", "planted_is_seen", "problem"),
    [(False, True, None), (True, True, "waits for the device"), (False, False, "is not noticed")],
)
def test_a_profile_proves_only_what_it_can_see(
    step_waits: bool, planted_is_seen: bool, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> None: ...

    def seen(which: Callable[[], Any]) -> bool:
        return step_waits if which is step else planted_is_seen

    monkeypatch.setattr(profile_loss, "loss_step", lambda *_: step)
    monkeypatch.setattr(profile_loss, "profile_of", lambda which, _: [*EVENTS, *([WAITS] if seen(which) else [])])
    monkeypatch.setattr(profile_loss, "objection_of_torch", lambda which: "it waits" if seen(which) else None)
    _, problems = profile_loss.examine(profile_loss.TINY_SHAPES[0], "triton", torch.device("cuda"))
    assert [problem in said for said in problems] == ([True] if problem else [])


def test_views_that_differ_and_batches_written_over_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's batches come before the CPU's: every second pair of calls is brighter here, and so is the delayed one."""
    pytest.importorskip("nvidia.dali")
    real, calls = check_views.batches, []

    def brighter(*arguments: Any, **keywords: Any) -> list[tuple[Tensor, Any]]:
        calls.append(keywords)
        wrong = (len(calls) % 2 == 0 and not calls[-1]) or calls[-1].get("busy")
        return [(views + 9 if wrong else views, ids) for views, ids in real(*arguments)]

    monkeypatch.setattr(check_views, "RECIPES", {"crop first, colour, blur": check_views.STRONG})
    monkeypatch.setattr(check_views, "STEPS", 2)
    monkeypatch.setattr(check_views, "batches", brighter)
    out = tmp_path / "views.json"
    assert check_views.run(Part(out, CPU, tiny=True)) == 1
    *levels, written_over = json.loads(out.read_text())["problems"]
    assert levels
    assert all("levels from the CPU's" in problem for problem in levels)
    assert written_over == "step 0: the batch was written over before it was used"


def test_a_step_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = check_step.build_step(check_step.TINY, Variant("fp32"), CPU)
    loss = expected(check_step.pixels_of(0, 64, CPU), torch.arange(check_step.IMAGES)[None], 0.1).loss.item()
    seen, problem = check_step.check(check_step.TINY, Variant("fp32"), CPU, loss)
    assert not problem, seen
    assert check_step.check(check_step.TINY, Variant("bf16"), CPU, loss + 0.2)[1] == "another loss than in float32"
    real = check_step.TrainStep.__call__

    def updates_all_the_same(step: Any, *arguments: Any, **keywords: Any) -> Any:
        result = real(step, *arguments, **keywords)
        with torch.no_grad():
            next(iter(step.model.parameters())).add_(result.failed.float())
        return result

    monkeypatch.setattr(check_step.TrainStep, "__call__", updates_all_the_same)
    assert check_step.check(check_step.TINY, Variant("fp32"), CPU, loss)[1] == "a failed step changed the weights"
