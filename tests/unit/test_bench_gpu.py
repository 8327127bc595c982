"""The program for a GPU machine: its quickest parts are rehearsed, and what it would say of faults is seen here.

Where a part needs CUDA, stand-ins show that its checks can fail; all parts: python -m tests.gpu OUT --tiny.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from kernels.whitening import WhiteningStatus, whiten, whiten_with_status
from tests.conftest import ROOT
from tests.gpu import __main__ as program
from tests.gpu import check_kernels, check_step, check_views, part, time_images, time_step, time_whitening
from tests.gpu.check_step import Variant
from tests.gpu.part import Line, Task

CPU = torch.device("cpu")
TINY = Task([], CPU, tiny=True)
VARIANT = {"torch": {"backend": "torch"}}


def rows_of(table: str) -> dict[str, tuple[str, str]]:
    """Part -> its state and what it said."""
    return {line[:12].strip(): (line[13:25].strip(), line[32:]) for line in table.splitlines()[1:]}


def test_the_quickest_part_rehearsed_by_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", str(tmp_path / "out"), "--tiny", "--only", "environment"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows_of(done.stdout)["environment"][0] == "ok"
    assert (tmp_path / "out" / "table.txt").read_text() == done.stdout
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text()).values()
    assert found["state"] == "ok"
    assert found["lines"][0]["packages"]["torch"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the program itself is run")
def test_whitening_rehearsed() -> None:
    pytest.importorskip("triton")
    names = [line["name"] for line in time_whitening.time_whitening(TINY)]
    assert names == [f"1 slices, {name}" for name in ("torch", "triton", "loop")]


def python(name: str, program_text: str, seconds: int = 9, needs: str = "json") -> program.Part:
    return program.Part(name, seconds, needs, ["-c", program_text])


def test_a_part_that_fails_stops_no_other_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = (
        "import pathlib, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '60']); pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        f"pathlib.Path({str(tmp_path / 'slow.json')!r}).write_text('{{\"lines\": [7]}}'); print('so far'); time.sleep(60)"
    )
    chosen = [
        python("bad", "print('why'); raise SystemExit(3)"),
        python("slow", slow, 5),
        python("absent", "", needs="torch,no_such_module,no.such.part"),
        python("elsewhere", "print('needs a GPU'); raise SystemExit(77)"),
        python("good", f"import json; print('first'); print(*json.load(open({str(tmp_path / 'results.json')!r})))"),
    ]
    assert program.run_all(chosen, tmp_path, 99) == 1
    assert rows_of(capsys.readouterr().out) == {
        "bad": ("FAILED (3)", "why"),
        "slow": ("OVER TIME", "stopped after 5 s; so far"),
        "absent": ("skipped", "missing: no_such_module, no.such.part"),
        "elsewhere": ("skipped", "needs a GPU"),
        "good": ("ok", "bad slow absent elsewhere"),  # what results.json has by then
    }
    assert json.loads((tmp_path / "results.json").read_text())["slow"]["lines"] == [7]
    state = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")  # of a process that the part started
    time.sleep(0.1)
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert program.run_all(chosen[3:], tmp_path, 99) == 0
    capsys.readouterr()
    assert program.run_all(chosen[4:], tmp_path, 4) == 1
    assert rows_of(capsys.readouterr().out) == {"good": ("NOT RUN", "no time is left")}


@pytest.mark.parametrize(
    "words", [[], ["--only"], ["out", "more"], ["out", "--seconds", "x"], ["out", "--only", "goood"]]
)
def test_wrong_words_are_answered_with_the_usage(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(program, "has_gpu", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        program.main(words)
    assert "python -m tests.gpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "--tiny rehearses on a CPU" in done.stderr


def test_every_line_is_on_the_disk_before_the_next_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"

    def lines() -> Iterator[Line]:
        yield {"name": "one", "said": "1 ms", "ms": 1}
        assert json.loads(out.read_text())["lines"] == [{"name": "one", "said": "1 ms", "ms": 1}]
        yield {"name": "two", "problem": "slow"}
        raise RuntimeError("a broken GPU\nand more")

    assert part.record(lines(), out, CPU) == 1
    assert [line["name"] for line in json.loads(out.read_text())["lines"]] == ["one", "two", "what follows"]
    assert capsys.readouterr().out.splitlines()[-1] == "2 problem(s): two: slow; one 1 ms"
    assert part.record(iter([{"name": "one"}]), out, CPU) == 0


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
    (line,) = check_kernels.accuracy(CPU, ((2, 33, 16), 1e2, 0.05))
    assert ("problem" in line) == bool(problem)
    assert problem in line.get("problem", "")


def leaves_the_bad(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) + x * torch.tensor([0, 1, 0])[:, None, None]


def harms_the_good(x: Tensor, **keywords: Any) -> Tensor:
    return whiten(x, **keywords) * (1 + x[1].nan_to_num().square().mean())


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (whiten, None),
        (leaves_the_bad, "z of the bad slice is not 0"),
        (harms_the_good, "z of a good slice changed"),
    ],
)
def test_harm_of_failed_slices_is_noticed(
    function: Callable[..., Tensor], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "whiten", function)
    (line,) = check_kernels.failed_slices(CPU, (3, 19, 17), "nan", 0.0)
    assert line.get("problem") == problem


def test_a_wrong_status_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_well(x: Tensor, **keywords: Any) -> tuple[Tensor, WhiteningStatus]:
        z, status = whiten_with_status(x, **keywords)
        return z, status._replace(ok=torch.ones_like(status.ok))

    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "whiten_with_status", all_well)
    (line,) = check_kernels.failed_slices(CPU, (3, 19, 17), "nan", 0.0)
    assert line["problem"].startswith("status says ok [True, True, True]")


@pytest.mark.parametrize("replays", [True, False])
def test_a_graph_that_does_not_follow_its_input_is_noticed(replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for CUDA: a graph that calls the step again, or does nothing; a debug mode that objects."""

    def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
        returned = step()

        def replay() -> None:
            for old, new in zip(returned, step(), strict=True):
                old.copy_(new)

        return SimpleNamespace(replay=replay if replays else lambda: None), returned

    def without_waiting(step: Callable[[], Any], _: torch.device) -> Any:
        if not replays:
            raise RuntimeError("called a synchronizing CUDA operation")
        return step()

    monkeypatch.setattr(check_kernels, "VARIANTS", VARIANT)
    monkeypatch.setattr(check_kernels, "capture", capture)
    monkeypatch.setattr(check_kernels, "without_waiting", without_waiting)
    waits, graph = check_kernels.waiting_and_graphs(CPU)
    assert ("problem" in graph) != replays
    assert waits.get("problem") == (None if replays else "RuntimeError: called a synchronizing CUDA operation")


def test_targets_of_the_whitening() -> None:
    good = time_whitening.judge(4, {"torch": 999.0, "triton": 149.0, "loop": 3000.0})
    assert good["said"] == "best triton 149 us, 20 times as fast as the loop"
    assert "problem" not in good
    assert "400 us" in time_whitening.judge(64, {"triton": 401.0, "loop": 9000.0})["problem"]
    assert "20 times" in time_whitening.judge(64, {"triton": 399.0, "loop": 7900.0})["problem"]
    assert "problem" in time_whitening.judge(4, {"triton": 100.0})  # the loop failed


def event(name: str, start: int, end: int, kind: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
    said = {"name": name, "duration_ns": end - start, "device_type": kind, "is_user_annotation": annotation}
    return SimpleNamespace(**{k: lambda v=v: v for k, v in said.items()})


def test_kernels_of_profiled_steps_are_added_up() -> None:
    events = [
        event("cudaLaunchKernel", 0, 9_000_000, DeviceType.CPU),
        event("factor", 0, 3_000_000),
        event("apply", 0, 1_000_000),
        event("apply", 0, 5_000_000),
        event("forward", 0, 9_000_000, annotation=True),
    ]
    assert time_step.longest_kernels(events, DeviceType.CUDA) == [
        {"name": "apply", "calls": 2 / 3, "ms": 2.0},
        {"name": "factor", "calls": 1 / 3, "ms": 1.0},
    ]


class Nvml:
    """As much of NVIDIA's library as is called; busy half of the time."""

    def __init__(self, code: int) -> None:
        self.code = code

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        assert uuid == b"GPU-1-2"
        return 0

    def nvmlDeviceGetJpgUtilization(self, handle: Any, percent: Any, period: Any) -> int:  # noqa: N802
        percent._obj.value = 50
        return self.code


@pytest.mark.parametrize(("code", "said"), [(0, "50 % busy"), (3, "not seen: NVML says (3,)")])
def test_use_of_the_jpeg_engine(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_images, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(code))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    engine = time_images.JpegEngine(torch.device("cuda"))
    engine.start()
    time.sleep(0.2)
    assert engine.stop()["said"] == said


def test_views_that_differ_and_batches_written_over_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's batches come before the CPU's: every second pair of calls is brighter here, and so is the busy one."""
    pytest.importorskip("nvidia.dali")
    real, calls = check_views.batches, []

    def brighter(*arguments: Any, **keywords: Any) -> list[tuple[Tensor, Any]]:
        calls.append(keywords)
        wrong = (len(calls) % 2 == 0 and not calls[-1]) or calls[-1].get("busy")
        return [(views + 9 if wrong else views, ids) for views, ids in real(*arguments)]

    monkeypatch.setattr(check_views, "STEPS", 2)
    monkeypatch.setattr(check_views, "batches", brighter)
    *levels, busy = check_views.check_views(TINY)
    assert levels
    assert all(line["problem"] == "too far from the CPU's" for line in levels)
    assert busy["problem"] == "steps [0, 1] have other views than on an idle device"


def test_a_step_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (check_step.float32_loss(check_step.TINY, parts, CPU) for parts in (1, 2))
    assert "problem" not in check_step.check(check_step.TINY, Variant("fp32", parts=2), CPU, two)
    other = {"problem": "another loss than in float32"}
    assert other.items() <= check_step.check(check_step.TINY, Variant("fp32", parts=2), CPU, one).items()
    assert other.items() <= check_step.check(check_step.TINY, Variant("bf16"), CPU, one + 0.2).items()
    real = check_step.TrainStep.__call__

    def updates_all_the_same(step: Any, *arguments: Any, **keywords: Any) -> Any:
        result = real(step, *arguments, **keywords)
        with torch.no_grad():
            next(iter(step.model.parameters())).add_(result.failed.float())
        return result

    monkeypatch.setattr(check_step.TrainStep, "__call__", updates_all_the_same)
    line = check_step.check(check_step.TINY, Variant("fp32"), CPU, one)
    assert line["problem"] == "a failed step changed the weights"
