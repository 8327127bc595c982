"""One step of the loss under torch's profiler: python -m tests.gpu.profile_loss OUT.json [--tiny]

Shows that nothing in it waits for the device, by two witnesses: torch's own debug mode, and the calls to CUDA that the
profiler saw. Both must notice a wait that is put in. Lists the kernels with their times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from tests.gpu.part import Part, begin, end, in_words, table
from trainer.bench.cost import profile_events
from trainer.bench.shapes import LossShape
from trainer.losses.wmse import wmse_loss_with_status

SHAPES = (LossShape(4, 256, 256, 128, 1), LossShape(4, 4096, 256, 128, 1))
TINY_SHAPES = (LossShape(2, 8, 8, 4, 1),)
MARK = "one step of the loss"
WAITING_CALLS = ("cudaMemcpy", "cudaFree", "cudaHostAlloc", "cudaFreeHost")  # beside those that say Synchronize

Step = Callable[[], Any]


def loss_step(shape: LossShape, backend: str, device: torch.device) -> Step:
    """Forward and backward, as a training step calls them -> the loss and its gradient."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(shape.num_views * shape.num_images, shape.embedding_size, generator=generator)
    v = v.to(device).requires_grad_()
    permutations = torch.arange(shape.num_images, device=device)[None]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss, _ = wmse_loss_with_status(
            v, num_views=shape.num_views, slice_size=shape.slice_size, permutations=permutations, backend=backend
        )
        return loss, torch.autograd.grad(loss, v)[0]

    return step


def step_that_waits(step: Step) -> Step:
    """The same, and then the host reads the loss: what both witnesses must notice."""
    return lambda: step()[0].item()


def objection_of_torch(step: Step) -> str | None:
    """What torch's debug mode says of a step that waits for the device; None where it says nothing."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return in_words(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def profile_of(step: Step, device: torch.device) -> list[Any]:
    """Raw events of one step, which a range of the name MARK encloses on the host's side."""

    def marked() -> None:
        with record_function(MARK):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # behind the mark: the kernels are to be in the profile

    step()
    return profile_events(marked, memory=False, cuda=device.type == "cuda")


def waiting_calls(events: Iterable[Any]) -> list[str]:
    """Names of the host's calls inside the mark that wait for the device."""
    on_host = [event for event in events if event.device_type() == DeviceType.CPU]
    (mark,) = [event for event in on_host if event.name() == MARK]
    inside = [event for event in on_host if mark.start_ns() <= event.start_ns() < mark.end_ns()]
    return [e.name() for e in inside if "Synchronize" in e.name() or e.name() in WAITING_CALLS]


def kernel_times(events: Iterable[Any], where: DeviceType) -> list[dict[str, Any]]:
    """-> name, calls, microseconds in all of what ran on a device (on a CPU: operators with what they call), longest first."""
    times: dict[str, list[float]] = {}
    for event in events:
        if event.device_type() == where and not event.is_user_annotation() and event.name() != MARK:
            times.setdefault(event.name(), []).append(event.duration_ns() / 1e3)
    kernels = [{"name": name, "calls": len(us), "microseconds": sum(us)} for name, us in times.items()]
    return sorted(kernels, key=lambda kernel: -kernel["microseconds"])


def examine(shape: LossShape, backend: str, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """-> what one step does, and what is wrong with it."""
    step = loss_step(shape, backend, device)
    events = profile_of(step, device)
    found: dict[str, Any] = {"shape": shape._asdict(), "backend": backend, "waiting_calls": waiting_calls(events)}
    if device.type != "cuda":
        return found | {"kernels": kernel_times(events, DeviceType.CPU)}, []
    found |= {"kernels": kernel_times(events, DeviceType.CUDA), "torch_says": objection_of_torch(step)}
    where, problems = f"{shape.num_images} images, {backend}", []
    if not found["kernels"]:
        problems.append(f"{where}: the profiler saw no kernel")
    if found["torch_says"] or found["waiting_calls"]:
        problems.append(f"{where}: waits for the device: {found['torch_says']}, {found['waiting_calls']}")
    planted = step_that_waits(step)
    if not objection_of_torch(planted) or not waiting_calls(profile_of(planted, device)):
        problems.append(f"{where}: a wait that was put in is not noticed, so that none was seen means nothing")
    return found, problems


def run(part: Part) -> int:
    """Every shape by both backends; the exit code of the part."""
    results, problems = [], []
    for shape in TINY_SHAPES if part.tiny else SHAPES:
        for backend in ("triton", "torch"):
            found, wrong = examine(shape, backend, part.device)
            results.append(found)
            problems += wrong
            total = sum(kernel["microseconds"] for kernel in found["kernels"])
            print(
                f"\n{tuple(shape)}, {backend}: {total:.0f} us, waiting calls: {found.get('waiting_calls', 'not looked for')}"
            )
            rows = [(f"{k['microseconds']:.1f}", str(k["calls"]), k["name"][:110]) for k in found["kernels"][:40]]
            print(table([("us", "calls", "name"), *rows]))
    checked = part.device.type == "cuda"
    summary = (
        "nothing waits for the device" if checked else "rehearsed; whether anything waits for the device needs a GPU"
    )
    return end(part, {"results": results}, problems, summary)


if __name__ == "__main__":
    sys.exit(run(begin(__doc__)))
