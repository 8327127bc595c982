"""Check every backend of the whitening against float64: python -m tests.gpu.check_kernels OUT.json [--tiny]

Value and gradient at all sizes, failed slices, no waiting for the device, CUDA graphs. Several processes compile the kernels
ahead of the checks into Triton's cache on the disk.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from kernels.whitening import whiten, whiten_with_status
from tests.gpu.part import Line, Task, attempt, capture, main, without_waiting
from tests.numerics.whitening_cases import FAULTS, definition, random_like, rows_of_condition, spoil, value_and_gradient

Size = tuple[int, int, int]  # slices, rows, embedding size
Case = tuple[Size, float, float]  # size, condition number, eps

# one panel of the factor and several, full and cut tiles, few rows and many; the first eight have one of each
SIZES: list[Size] = [(4, 256, 128), (64, 256, 128), (2, 5, 2), (1, 70, 33), (8, 128, 64), (3, 110, 100), (2, 512, 256)]
SIZES += [(2, 1024, 512), (1, 40, 8), (2, 33, 16), (1, 100, 64), (128, 16, 8), (2, 300, 150), (1, 4096, 64)]
SIZES += [(3, 700, 321), (1, 544, 512)]
EPS = (0.0, 0.05)
FIRST = 8
CASES: list[Case] = [(size, 1e2, eps) for size in SIZES[:FIRST] for eps in EPS]
CASES += [((4, 256, 128), 1e6, 0.0), ((8, 128, 64), 1e6, 0.0)]
CASES += [(size, 1e2, eps) for size in SIZES[FIRST:] for eps in EPS]
TINY_CASES: list[Case] = [((2, 5, 2), 1e2, 0.0), ((1, 33, 17), 1e2, 0.05)]
FAULT_SIZES: list[Size] = [(3, 256, 128), (3, 33, 17)]
VARIANTS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton"},
    "torch": {"backend": "torch"},
    "torch, float64 factor": {"backend": "torch", "cholesky_float64": True},
}
ROUNDING = 2.0**-23  # two of float32, which a tiny case may be without by luck
# of a float64 factor at any condition; products of the backward are in float32: 8e-7 were seen on a CPU
FLOAT64_BOUND = 2e-6


def compile_ahead(size: Size, eps: float) -> None:
    """Compile both passes of the Triton backend, in another process."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    whiten(x, eps=eps, backend="triton").sum().backward()


def accuracy(device: torch.device, case: Case) -> Iterator[Line]:
    """Check that errors are at most twice those of the definition in float32, and far below with the factor in float64."""
    size, condition, eps = case
    x = (rows_of_condition(*size, condition) + 1).float().to(device)
    grad_z = random_like(x)
    truth = value_and_gradient(lambda x: definition(x, eps), x.double(), grad_z)
    plain = _worst_errors_of_plain_float32(x, grad_z, eps, truth)
    for variant, keywords in VARIANTS.items():

        def check(keywords: dict[str, Any] = keywords) -> Line:
            ours = value_and_gradient(lambda x: whiten(x, eps=eps, **keywords), x, grad_z)
            precise = "cholesky_float64" in keywords
            bounds = [FLOAT64_BOUND] * 2 if precise else [2 * error + ROUNDING for error in plain]
            errors = _errors(ours, truth)
            line: Line = {"errors": errors, "plain": plain}
            if not all(error <= bound for error, bound in zip(errors, bounds, strict=True)):  # NaN is not
                line["problem"] = (
                    f"z {errors[0]:.1e}, gradient {errors[1]:.1e}: above {bounds[0]:.1e} or {bounds[1]:.1e}"
                )
            return line

        yield attempt(f"{variant}, {'x'.join(map(str, size))} condition {condition:.0e} eps {eps:g}", check)


def _errors(actual: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    return [((a - t).norm() / t.norm()).item() for a, t in zip(actual, truth, strict=True)]


def _worst_errors_of_plain_float32(x: Tensor, grad_z: Tensor, eps: float, truth: tuple[Tensor, ...]) -> list[float]:
    """Return the worst errors over three orders of the rows, which change only the rounding: one may be good by luck."""
    worst = [0.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        order = torch.randperm(x.shape[1], generator=generator).to(x.device)
        plain = value_and_gradient(lambda x: definition(x, eps), x[:, order], grad_z[:, order])
        worst = [max(pair) for pair in zip(worst, _errors(plain, tuple(t[:, order] for t in truth)), strict=True)]
    return worst


def failed_slices(device: torch.device, size: Size, fault: str, eps: float) -> Iterator[Line]:
    """A slice that cannot be whitened gives z = 0 and gradient 0, is named in the status, and harms no other."""
    for variant, keywords in VARIANTS.items():
        if fault == "1e30" and "cholesky_float64" in keywords:  # whose variance float64 can hold
            continue

        def check(keywords: dict[str, Any] = keywords) -> Line:
            problem = _harm(rows_of_condition(*size, 1e2).float().to(device), fault, {"eps": eps, **keywords})
            return {"problem": problem} if problem else {}

        yield attempt(f"{variant}, {'x'.join(map(str, size))} {fault} eps {eps:g}", check)


def _harm(x: Tensor, fault: str, keywords: dict[str, Any]) -> str:
    grad_z = random_like(x)
    clean = value_and_gradient(lambda x: whiten(x, **keywords), x, grad_z)
    spoil(x[1], fault)
    grad_z[1] = float("nan")  # as from a division by the norm of z = 0
    spoiled = value_and_gradient(lambda x: whiten(x, **keywords), x, grad_z)
    status = whiten_with_status(x, **keywords)[1]
    if status.ok.tolist() != [i != 1 for i in range(len(x))] or status.min_pivot[1] != 0:
        return f"status says ok {status.ok.tolist()}, min_pivot {status.min_pivot.tolist()}"
    for name, before, after in zip(("z", "gradient"), clean, spoiled, strict=True):
        if not (after[1] == 0).all():
            return f"{name} of the bad slice is not 0"
        if not all(torch.allclose(before[i], after[i], rtol=1e-5, atol=1e-5) for i in (0, 2)):
            return f"{name} of a good slice changed"
    return ""


def waiting_and_graphs(device: torch.device) -> Iterator[Line]:
    """Check that nothing waits for the device, and that a captured pass equals an eager one on new rows. CUDA only."""
    for variant, keywords in VARIANTS.items():
        x = rows_of_condition(4, 256, 128, 1e2).float().to(device).requires_grad_()
        grad_z = random_like(x)

        def step(x: Tensor = x, grad_z: Tensor = grad_z, keywords: dict[str, Any] = keywords) -> tuple[Tensor, ...]:
            z = whiten(x, **keywords)
            return z.detach(), *torch.autograd.grad(z, x, grad_z)

        def no_wait(step: Any = step) -> Line:
            step()  # compiles, and makes the handles of libraries
            without_waiting(step, device)
            return {}

        def graph(step: Any = step, x: Tensor = x) -> Line:
            captured, returned = capture(step)
            with torch.no_grad():
                x.copy_(rows_of_condition(4, 256, 128, 1e3, seed=1).float())
            captured.replay()
            errors = _errors(returned, step())
            good = all(error < 1e-5 for error in errors)  # False for NaN
            return {"errors": errors} if good else {"problem": f"a replay is {errors} off an eager call"}

        def repeat(step: Any = step) -> Line:
            first = step()
            same = all(torch.equal(a, b) for _ in range(200) for a, b in zip(step(), first, strict=True))
            return {} if same else {"problem": "one of 200 passes has other bits"}

        yield attempt(f"{variant}, waits for nothing", no_wait)
        if variant == "triton":  # its factor hands rows on through memory
            yield attempt(f"{variant}, 200 times the same", repeat)
        yield attempt(f"{variant}, CUDA graph", graph)


def _order_of_need() -> list[tuple[Size, float]]:
    wanted = [(size, eps) for size, _, eps in CASES]
    first = FIRST * len(EPS)
    return [*wanted[:first], *itertools.product(FAULT_SIZES, EPS), *wanted[first:]]


def check_kernels(task: Task) -> Iterator[Line]:
    """Make all checks, representative sizes first, each as soon as its kernels are compiled."""
    if task.device.type != "cuda":
        for case in TINY_CASES:
            yield from accuracy(task.device, case)
        yield from failed_slices(task.device, (3, 9, 4), *FAULTS[0])
        return
    workers = max(1, min(8, len(os.sched_getaffinity(0)) - 1))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    compiled: dict[tuple[Size, float], Future[None]] = {}
    for size, eps in _order_of_need():
        compiled[size, eps] = compiled.get((size, eps)) or pool.submit(compile_ahead, size, eps)
    for number, case in enumerate(CASES):
        compiled[case[0], case[2]].exception()  # which the check will meet, too, and report
        yield from accuracy(task.device, case)
        if number == FIRST * len(EPS) - 1:
            yield from waiting_and_graphs(task.device)
            for size in FAULT_SIZES:
                for fault in FAULTS:
                    yield from failed_slices(task.device, size, *fault)
    pool.shutdown()


if __name__ == "__main__":
    main(check_kernels, __doc__)
