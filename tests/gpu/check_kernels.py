"""Check every backend of the whitening against float64: python -m tests.gpu.check_kernels OUT.json [--tiny]

The checks cover value and gradient at all sizes, failed slices, waiting for the device, and CUDA graphs. Several processes
compile the kernels ahead of the checks into Triton's cache on the disk.
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

# One panel of the factor and several, full and partial tiles, few and many rows. The first eight have one of each kind.
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
ROUNDING = 2.0**-23  # allowance of two roundings of float32; plain float32 may be exact in a tiny case
# Largest error with a float64 factor at any condition number. Backward has products in float32: a CPU gave 8e-7.
FLOAT64_BOUND = 2e-6


def compile_ahead(size: Size, eps: float) -> None:
    """Compile forward and backward of the Triton backend. Other processes call this."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator).cuda().requires_grad_()
    whiten(x, eps=eps, backend="triton").sum().backward()


def accuracy(device: torch.device, case: Case) -> Iterator[Line]:
    """Check that errors are at most twice those of the definition in float32, and tiny with the factor in float64."""
    size, condition, eps = case
    rows = rows_of_condition(*size, condition) + 1
    x = rows.float().to(device)
    grad_z = random_like(x)
    # The definition in float64 is the truth, and in float32 it sets the bounds.
    truth = value_and_gradient(lambda x: definition(x, eps), x.double(), grad_z)
    plain = _worst_errors_of_plain_float32(x, grad_z, eps, truth)
    for variant, keywords in VARIANTS.items():

        def check(keywords: dict[str, Any] = keywords) -> Line:
            ours = value_and_gradient(lambda x: whiten(x, eps=eps, **keywords), x, grad_z)
            if "cholesky_float64" in keywords:
                bounds = [FLOAT64_BOUND, FLOAT64_BOUND]
            else:
                bounds = [2 * error + ROUNDING for error in plain]
            errors = _errors(ours, truth)
            line: Line = {"errors": errors, "plain": plain}
            # An error of NaN is not below its bound.
            below = [error <= bound for error, bound in zip(errors, bounds, strict=True)]
            if not all(below):
                found = f"z {errors[0]:.1e}, gradient {errors[1]:.1e}"
                line["problem"] = f"{found}: above {bounds[0]:.1e} or {bounds[1]:.1e}"
            return line

        yield attempt(f"{variant}, {_text(size)} condition {condition:.0e} eps {eps:g}", check)


def _text(size: Size) -> str:
    return "x".join(map(str, size))


def _errors(actual: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    """Return the relative errors of z and its gradient."""
    return [((a - t).norm() / t.norm()).item() for a, t in zip(actual, truth, strict=True)]


def _worst_errors_of_plain_float32(x: Tensor, grad_z: Tensor, eps: float, truth: tuple[Tensor, ...]) -> list[float]:
    """Return the worst errors over three orders of the rows. The order changes only the rounding, which may be lucky once."""
    worst = [0.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        order = torch.randperm(x.shape[1], generator=generator).to(x.device)
        plain = value_and_gradient(lambda x: definition(x, eps), x[:, order], grad_z[:, order])
        expected = tuple(t[:, order] for t in truth)
        errors = _errors(plain, expected)
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return worst


def failed_slices(device: torch.device, size: Size, fault: str, eps: float) -> Iterator[Line]:
    """Check that a slice that cannot be whitened gives z = 0 and gradient 0, is in the status, and affects no other slice."""
    for variant, keywords in VARIANTS.items():
        # float64 can hold the variance of 1e30, so that is no fault there.
        if fault == "1e30" and "cholesky_float64" in keywords:
            continue

        def check(keywords: dict[str, Any] = keywords) -> Line:
            x = rows_of_condition(*size, 1e2).float().to(device)
            problem = _harm(x, fault, {"eps": eps, **keywords})
            return {"problem": problem} if problem else {}

        yield attempt(f"{variant}, {_text(size)} {fault} eps {eps:g}", check)


def _harm(x: Tensor, fault: str, keywords: dict[str, Any]) -> str:
    """Spoil slice 1 of x, and return what is wrong with the result; an empty text if nothing is."""
    # Value and gradient before and after.
    grad_z = random_like(x)
    clean = value_and_gradient(lambda x: whiten(x, **keywords), x, grad_z)
    spoil(x[1], fault)
    grad_z[1] = float("nan")  # what a loss gives for z = 0, by a division by its norm
    spoiled = value_and_gradient(lambda x: whiten(x, **keywords), x, grad_z)
    _, status = whiten_with_status(x, **keywords)
    expected_ok = [i != 1 for i in range(len(x))]
    if status.ok.tolist() != expected_ok or status.min_pivot[1] != 0:
        return f"status says ok {status.ok.tolist()}, min_pivot {status.min_pivot.tolist()}"
    for name, before, after in zip(("z", "gradient"), clean, spoiled, strict=True):
        if not (after[1] == 0).all():
            return f"{name} of the failed slice is not 0"
        unchanged = [torch.allclose(before[i], after[i], rtol=1e-5, atol=1e-5) for i in (0, 2)]
        if not all(unchanged):
            return f"{name} of another slice changed"
    return ""


def waiting_and_graphs(device: torch.device) -> Iterator[Line]:
    """Check that nothing waits for the device, and that a CUDA graph gives the same as an eager call on new rows. CUDA only."""
    for variant, keywords in VARIANTS.items():
        x = rows_of_condition(4, 256, 128, 1e2).float().to(device).requires_grad_()
        grad_z = random_like(x)

        def step(x: Tensor = x, grad_z: Tensor = grad_z, keywords: dict[str, Any] = keywords) -> tuple[Tensor, ...]:
            z = whiten(x, **keywords)
            return z.detach(), *torch.autograd.grad(z, x, grad_z)

        def no_wait(step: Any = step) -> Line:
            step()  # compiles, and creates the handles of libraries
            without_waiting(step, device)
            return {}

        def graph(step: Any = step, x: Tensor = x) -> Line:
            captured, returned = capture(step)
            # A replay must read the new rows from the same memory.
            rows = rows_of_condition(4, 256, 128, 1e3, seed=1)
            with torch.no_grad():
                x.copy_(rows.float())
            captured.replay()
            errors = _errors(returned, step())
            good = all(error < 1e-5 for error in errors)  # False for NaN
            return {"errors": errors} if good else {"problem": f"a replay differs from an eager call by {errors}"}

        def repeat(step: Any = step) -> Line:
            first = step()
            for _ in range(200):
                same = [torch.equal(a, b) for a, b in zip(step(), first, strict=True)]
                if not all(same):
                    return {"problem": "one of 200 passes has other bits"}
            return {}

        yield attempt(f"{variant}, waits for nothing", no_wait)
        if variant == "triton":  # the warps of its factor exchange rows through memory
            yield attempt(f"{variant}, 200 times the same", repeat)
        yield attempt(f"{variant}, CUDA graph", graph)


def _order_of_need() -> list[tuple[Size, float]]:
    """Return the (size, eps) to compile, in the order of the checks; sizes may occur twice."""
    wanted = [(size, eps) for size, _, eps in CASES]
    first = FIRST * len(EPS)
    return [*wanted[:first], *itertools.product(FAULT_SIZES, EPS), *wanted[first:]]


def check_kernels(task: Task) -> Iterator[Line]:
    """Run all checks, representative sizes first, each as soon as its kernels are compiled."""
    if task.device.type != "cuda":
        for case in TINY_CASES:
            yield from accuracy(task.device, case)
        yield from failed_slices(task.device, (3, 9, 4), *FAULTS[0])
        return
    # Leave a core for the checks.
    workers = max(1, min(8, len(os.sched_getaffinity(0)) - 1))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    compiled: dict[tuple[Size, float], Future[None]] = {}
    for size, eps in _order_of_need():
        if (size, eps) not in compiled:
            compiled[size, eps] = pool.submit(compile_ahead, size, eps)
    for number, case in enumerate(CASES):
        size, _, eps = case
        compiled[size, eps].exception()  # waits; the check meets the same error and reports it
        yield from accuracy(task.device, case)
        if number == FIRST * len(EPS) - 1:
            yield from waiting_and_graphs(task.device)
            for fault_size, fault in itertools.product(FAULT_SIZES, FAULTS):
                yield from failed_slices(task.device, fault_size, *fault)
    pool.shutdown()


if __name__ == "__main__":
    main(check_kernels, __doc__)
