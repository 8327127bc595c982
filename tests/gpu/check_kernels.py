"""Every backend of the whitening against float64, without pytest: python -m tests.gpu.check_kernels OUT.json [--tiny]

Value and gradient at all sizes, failed slices, no waiting for the device, CUDA graphs. Prints a line for each check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.whitening import whiten, whiten_with_status
from tests.gpu.part import Part, begin, capture, end, in_words
from tests.numerics.whitening_cases import FAULTS, definition, random_like, rows_of_condition, spoil, value_and_gradient

Size = tuple[int, int, int]  # slices, rows, embedding size

# one panel of the factor and several, full and cut tiles, few rows and many
SIZES: list[Size] = [(2, 5, 2), (1, 40, 8), (2, 33, 16), (1, 70, 33), (1, 100, 64), (128, 16, 8), (8, 64, 32)]
SIZES += [(8, 128, 64), (3, 110, 100), (4, 256, 128), (64, 256, 128), (2, 300, 150), (2, 512, 256), (1, 4096, 64)]
SIZES += [(3, 700, 321), (2, 1024, 512), (1, 544, 512)]
CONDITIONED: list[Size] = [(8, 128, 64), (4, 256, 128)]
TINY_SIZES: list[Size] = [(2, 5, 2), (1, 33, 17)]
VARIANTS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton"},
    "torch": {"backend": "torch"},
    "torch, float64 factor": {"backend": "torch", "float64_factor": True},
}
ROUNDING = 2.0**-23  # two of float32, which a tiny case may be without by luck
# of a float64 factor at any condition; products of the backward are in float32: 8e-7 were seen on a CPU
FLOAT64_BOUND = 2e-6
ROW = "{:<21}  {:<36}  {:<47}  {}"


class Line(NamedTuple):
    """One check."""

    variant: str
    what: str
    figures: str
    problem: str  # empty where there is none


def attempt(variant: str, what: str, check: Callable[[], tuple[str, str]]) -> Line:
    """A check's (figures, problem) as a line; an error is a problem of this check alone."""
    try:
        return Line(variant, what, *check())
    except Exception as error:  # whatever it is, it is reported, and the others are still checked
        return Line(variant, what, "", in_words(error))


def accuracy(device: torch.device, sizes: list[Size], conditioned: list[Size]) -> Iterator[Line]:
    """Errors of value and gradient at most twice those of the definition in float32, differentiated by torch; with the
    factor in float64 far below."""
    cases = [(size, 1e2, eps) for size in sizes for eps in (0.0, 0.05)] + [(size, 1e6, 0.0) for size in conditioned]
    for size, condition, eps in cases:
        x = (rows_of_condition(*size, condition) + 1).float().to(device)
        grad_z = random_like(x)
        truth = value_and_gradient(lambda x, eps=eps: definition(x, eps), x.double(), grad_z)
        plain = _worst_errors_of_plain_float32(x, grad_z, eps, truth)
        for variant, keywords in VARIANTS.items():

            def check(keywords=keywords, x=x, grad_z=grad_z, truth=truth, plain=plain, eps=eps) -> tuple[str, str]:
                ours = value_and_gradient(lambda x: whiten(x, eps=eps, **keywords), x, grad_z)
                precise = "float64_factor" in keywords
                return _compare(_errors(ours, truth), plain, [FLOAT64_BOUND] * 2 if precise else _twice(plain))

            yield attempt(variant, f"{'x'.join(map(str, size))} condition {condition:.0e} eps {eps:g}", check)


def _errors(actual: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    return [((a - t).norm() / t.norm()).item() for a, t in zip(actual, truth, strict=True)]


def _worst_errors_of_plain_float32(x: Tensor, grad_z: Tensor, eps: float, truth: tuple[Tensor, ...]) -> list[float]:
    """Over three orders of the rows, which change nothing but rounding: one may be good by luck."""
    worst = [0.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        order = torch.randperm(x.shape[1], generator=generator).to(x.device)
        plain = value_and_gradient(lambda x: definition(x, eps), x[:, order], grad_z[:, order])
        worst = [max(pair) for pair in zip(worst, _errors(plain, tuple(t[:, order] for t in truth)), strict=True)]
    return worst


def _twice(plain: list[float]) -> list[float]:
    return [2 * error + ROUNDING for error in plain]


def _compare(errors: list[float], plain: list[float], bounds: list[float]) -> tuple[str, str]:
    pairs = zip(("z", "gradient"), errors, plain, strict=True)
    figures = ", ".join(f"{name} {error:.1e} ({other:.1e})" for name, error, other in pairs)
    good = all(error <= bound for error, bound in zip(errors, bounds, strict=True))  # False for NaN
    return figures, "" if good else f"above {bounds[0]:.1e} or {bounds[1]:.1e}"


def failed_slices(device: torch.device, sizes: list[Size], faults: list[tuple[str, float]]) -> Iterator[Line]:
    """A slice that cannot be whitened gives z = 0 and gradient 0, is named in the status, and harms no other."""
    for size in sizes:
        for variant, keywords in VARIANTS.items():
            for fault, eps in faults:
                if fault == "1e30" and "float64_factor" in keywords:  # whose variance float64 can hold
                    continue

                def check(keywords=keywords, size=size, fault=fault, eps=eps) -> tuple[str, str]:
                    x = rows_of_condition(*size, 1e2).float().to(device)
                    return "", _harm(x, fault, {"eps": eps, **keywords})

                yield attempt(variant, f"{'x'.join(map(str, size))} {fault} eps {eps:g}", check)


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
    """torch raises where something waits for the device; a captured pass equals an eager one on new rows. CUDA only."""
    for variant, keywords in VARIANTS.items():
        x = rows_of_condition(4, 256, 128, 1e2).float().to(device).requires_grad_()
        grad_z = random_like(x)

        def step(x=x, grad_z=grad_z, keywords=keywords) -> tuple[Tensor, ...]:
            z = whiten(x, **keywords)
            return z.detach(), *torch.autograd.grad(z, x, grad_z)

        def no_wait(step=step) -> tuple[str, str]:
            step()  # compiles, and makes the handles of libraries
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            return "", ""

        def graph(step=step, x=x) -> tuple[str, str]:
            captured, returned = capture(step)
            with torch.no_grad():
                x.copy_(rows_of_condition(4, 256, 128, 1e3, seed=1).float())
            captured.replay()
            errors = _errors(returned, step())
            return f"{max(errors):.1e}", "" if max(errors) < 1e-5 else "a replay is not what an eager call gives"

        yield attempt(variant, "waits for nothing", no_wait)
        yield attempt(variant, "CUDA graph", graph)


def _checks(part: Part) -> Iterator[Line]:
    if part.tiny:
        yield from accuracy(part.device, TINY_SIZES, [])
        yield from failed_slices(part.device, [(3, 9, 4)], [FAULTS[0]])
    else:
        yield from accuracy(part.device, SIZES, CONDITIONED)
        yield from failed_slices(part.device, [(3, 33, 17), (3, 256, 128)], FAULTS)
    if part.device.type == "cuda":
        yield from waiting_and_graphs(part.device)
    else:
        print("skipped: waiting for the device and CUDA graphs, which need a GPU")


def run(part: Part) -> int:
    """All checks; the exit code of the part."""
    lines: list[Line] = []
    print(ROW.format("variant", "check", "error (of plain float32)", "problem"))
    try:
        for line in _checks(part):
            lines.append(line)
            print(ROW.format(*line))  # at once: what was checked stays if the time is up
    except Exception as error:  # of what the checks are held against, or of a GPU that a kernel left broken
        lines.append(Line("all", "the checks that follow", "", in_words(error)))
    problems = [f"{line.variant}, {line.what}: {line.problem}" for line in lines if line.problem]
    return end(part, {"checks": [line._asdict() for line in lines]}, problems, f"{len(lines)} checks passed")


if __name__ == "__main__":
    sys.exit(run(begin(__doc__)))
