"""Cost of a run over all ranks and starts: device-hours, energy and price, and the part that was spent again after restarts.

Energy comes from counters of the hardware: each rank reads its GPU's (NVML), and on a CPU the first rank of each node reads
those of the processors (RAPL). state.json and each checkpoint hold the account, see docs/cost.md. Imports torch only for a GPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cluster.runs import number, text
from trainer.config.cost import CostConfig
from trainer.distributed.cores import own_cores
from trainer.distributed.ranks import Ranks

if TYPE_CHECKING:
    import torch

_POWERCAP = Path("/sys/class/powercap")
_JOULES_PER_KWH = 3.6e6
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spent:
    """Amounts that a run has spent, over all ranks."""

    gpu_seconds: float = 0.0
    core_seconds: float = 0.0
    joules: float = 0.0
    unmeasured_seconds: float = 0.0
    """Seconds of ranks without an energy counter."""

    @classmethod
    def read(cls, values: object) -> Spent:
        """Read what `asdict` has written. A missing or damaged amount is 0."""
        found = values if isinstance(values, dict) else {}
        amounts = {}
        # Older programs wrote fewer amounts, and a user may have edited the file.
        for field in fields(cls):
            amount = number(found, field.name) or 0.0
            amounts[field.name] = max(amount, 0.0)
        return cls(**amounts)

    def with_each(self, other: Spent, join: Callable[[float, float], float]) -> Spent:
        """Join each amount with that of `other`."""
        amounts = {}
        for name, amount in asdict(self).items():
            amounts[name] = join(amount, getattr(other, name))
        return Spent(**amounts)

    def __add__(self, other: Spent) -> Spent:
        return self.with_each(other, lambda a, b: a + b)

    def __sub__(self, other: Spent) -> Spent:
        return self.with_each(other, lambda a, b: a - b)


class Counter:
    """Energy counter of the hardware, in joules since it was opened."""

    def __init__(self, read: Callable[[], int], unit: float, wraps_at: int = 0) -> None:
        """read: returns the counter. unit: joules of one count. wraps_at: number of counts after which it begins at 0."""
        self._read = read
        self._unit = unit
        self._wraps_at = wraps_at
        self._last = read()
        self.joules = 0.0

    def update(self) -> None:
        """Add what was spent since the last call. The counter may wrap around once between two calls."""
        now = self._read()
        added = now - self._last
        if added < 0:
            added += self._wraps_at or self._last  # without a known limit, it was set to 0
        self._last = now
        self.joules += added * self._unit


class EnergyMeter:
    """Counters of this rank's device. Threads may call `read` at once."""

    def __init__(self, counters: list[Counter], source: str, *, counts: bool = True) -> None:
        """source: NVML or RAPL; without counters the reason. counts: False for ranks whose energy another rank counts."""
        self._counters = counters
        self._counts = counts
        self._lock = threading.Lock()
        # Seconds after which the counters could not be read any more; None while they can.
        self._broke_after: float | None = None if counters else 0.0
        self._began = time.monotonic()
        self.source = source
        self.joules = 0.0
        self.unmeasured_seconds = 0.0

    def read(self) -> None:
        """Bring `joules` and `unmeasured_seconds` up to date."""
        with self._lock:
            seconds = time.monotonic() - self._began
            if self._broke_after is None:
                try:
                    for counter in self._counters:
                        counter.update()
                except Exception as error:  # the packages of NVML raise errors of their own
                    self._broke_after = seconds
                    self.source = f"not available: {error}"
                    _log.warning("the energy counter cannot be read any more: %s", error)
            # Only one rank of a node counts its processors.
            if self._counts:
                self.joules = sum(counter.joules for counter in self._counters)
            if self._broke_after is not None:
                self.unmeasured_seconds = seconds - self._broke_after


def open_meter(device: torch.device | None, ranks: Ranks, powercap: Path = _POWERCAP) -> EnergyMeter:
    """Open the energy counters of this rank. device: None for a CPU."""
    try:
        if device is not None and device.type == "cuda":
            return EnergyMeter([_nvml_counter(device)], "NVML")
        # The ranks of a node share its processors.
        return EnergyMeter(_rapl_counters(powercap), "RAPL", counts=ranks.local_rank == 0)
    except Exception as error:  # the packages of NVML raise errors of their own
        reason = getattr(error, "strerror", None) or str(error)
        return EnergyMeter([], f"not available: {reason}")


def _nvml_counter(device: torch.device) -> Counter:
    """Return the counter of a GPU, in millijoules since its driver was loaded."""
    import torch

    try:
        import pynvml
    except ImportError:
        raise OSError(0, "the package nvidia-ml-py is not installed (pip install 'wmse-trainer[energy]')") from None
    pynvml.nvmlInit()
    # NVML numbers the GPUs of the machine, and torch those that the process may see.
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return Counter(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 1e-3)


def _rapl_counters(powercap: Path) -> list[Counter]:
    """Return the counters of all processors, in microjoules. Raises OSError if there is none, or if one cannot be read."""
    # Folders with two numbers are parts of a processor, and psys is the whole machine.
    zones = sorted(powercap.glob("intel-rapl:*"))
    packages = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
    if not packages:
        raise OSError(0, f"this machine shows no energy counters in {powercap}")
    return [_rapl_counter(package) for package in packages]


def _rapl_counter(folder: Path) -> Counter:
    energy = folder / "energy_uj"
    try:
        wraps_at = int((folder / "max_energy_range_uj").read_text())
        return Counter(lambda: int(energy.read_text()), 1e-6, wraps_at)
    except PermissionError as error:
        # Linux restricts the counter to root, because its readings can leak secrets of other processes.
        raise OSError(error.errno, f"{energy} may only be read by root") from error


class RunCost:
    """Account of a run. Every rank has one; that of rank 0 holds the sums over ranks and starts."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device | None = None,
        prices: CostConfig | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:
        """device: None for a CPU. meter: None: that of the device."""
        self._began = time.monotonic()
        self._world_size = ranks.world_size
        self._is_gpu = device is not None and device.type == "cuda"
        self._cores = own_cores()
        self._prices = prices or CostConfig()
        self._lock = threading.Lock()
        self.meter = meter or open_meter(device, ranks)
        self._before = Spent()  # by earlier starts
        self._repeated = Spent()
        self._of_others = (0.0, 0.0)  # joules and unmeasured seconds of the other ranks at the last logged line

    def continue_from(self, content: object) -> None:
        """Continue the account of earlier starts. content: that of state.json; None: there is none."""
        found = content if isinstance(content, dict) else {}
        self._before = Spent.read(found)
        self._repeated = Spent.read(found.get("repeated"))

    def resumed(self, content: object, *, from_checkpoint: bool) -> None:
        """Count what was spent after the checkpoint that this start resumes from as repeated.

        content: the account in the checkpoint; None: an older program wrote it. from_checkpoint: False for a start without a
        checkpoint, which repeats everything."""
        if from_checkpoint and not isinstance(content, dict):
            return
        found = content if isinstance(content, dict) else {}
        at_checkpoint = Spent.read(found)
        # If the run was killed just after a save, state.json may be older than the checkpoint.
        self._before = self._before.with_each(at_checkpoint, max)
        self._repeated = Spent.read(found.get("repeated")) + (self._before - at_checkpoint)

    def own(self) -> tuple[float, float]:
        """Read the counters. Returns the joules and the unmeasured seconds of this rank since the start."""
        self.meter.read()
        return self.meter.joules, self.meter.unmeasured_seconds

    def add_line(self, record: Mapping[str, Any]) -> None:
        """Take over the sums over ranks of a logged line, from which `own_spent` is what this rank had spent then."""
        joules, unmeasured = record["own_spent"]
        with self._lock:
            self._of_others = (record["joules"] - joules, record["unmeasured_seconds"] - unmeasured)

    def total(self) -> Spent:
        """Return what the run has spent, as far as the counters have been read."""
        # All ranks start and end together, on devices of one kind.
        seconds = (time.monotonic() - self._began) * self._world_size
        # The training loop adds lines while a thread writes state.json.
        with self._lock:
            joules, unmeasured = self._of_others
        now = Spent(
            gpu_seconds=seconds if self._is_gpu else 0.0,
            core_seconds=0.0 if self._is_gpu else seconds * self._cores,
            joules=self.meter.joules + joules,
            unmeasured_seconds=self.meter.unmeasured_seconds + unmeasured,
        )
        return self._before + now

    def content(self) -> dict[str, Any]:
        """Return the account as state.json and checkpoints hold it."""
        total = self.total()
        return {
            **_rounded(total),
            "repeated": _rounded(self._repeated),
            "energy": self.meter.source,
            "price": self._price(total),
        }

    def _price(self, total: Spent) -> dict[str, Any] | None:
        """Return the price; None if the settings name none."""
        prices = self._prices
        if not (prices.price_per_device_hour or prices.price_per_kwh):
            return None
        hours = (total.gpu_seconds + total.core_seconds) / 3600
        kwh = total.joules / _JOULES_PER_KWH
        amount = hours * prices.price_per_device_hour + kwh * prices.price_per_kwh
        # Energy that no counter measured is missing from the price.
        is_low = bool(prices.price_per_kwh and total.unmeasured_seconds)
        return {
            "amount": round(amount, 6),
            "currency": prices.currency,
            "without_all_energy": is_low,
        }


def _rounded(spent: Spent) -> dict[str, float]:
    return {name: round(amount, 3) for name, amount in asdict(spent).items()}


def describe_hours(content: Mapping[str, Any]) -> str:
    """Return the device-hours of an account in words, such as "1.25 GPU-hours"; empty if it has none."""
    spent = Spent.read(dict(content))
    # A run that moved from a CPU to a GPU has both.
    named = {
        "GPU-hours": spent.gpu_seconds,
        "core-hours": spent.core_seconds,
    }
    parts = [f"{seconds / 3600:.3g} {name}" for name, seconds in named.items() if seconds]
    return " and ".join(parts)


def describe_cost(content: object) -> str:
    """Describe an account in words; empty if there is none."""
    if not isinstance(content, dict) or not content:
        return ""
    spent = Spent.read(content)
    parts = [
        describe_hours(content),
        _describe_energy(spent, content),
        _describe_price(content.get("price")),
    ]
    described = ", ".join(part for part in parts if part)
    again = content.get("repeated")
    repeated = describe_hours(again) if isinstance(again, dict) else ""
    if not repeated:
        return described
    joules = Spent.read(again).joules
    energy = f" and {joules / _JOULES_PER_KWH:.3g} kWh" if joules else ""
    return f"{described}; {repeated}{energy} of it again after restarts"


def _describe_price(price: object) -> str:
    amount = number(price, "amount") if isinstance(price, dict) else None
    if not isinstance(price, dict) or amount is None:
        return ""
    at_least = "at least " if price.get("without_all_energy") else ""
    currency = text(price, "currency") or ""
    return f"{at_least}{amount:.4g} {currency}".strip()


def _describe_energy(spent: Spent, content: Mapping[str, Any]) -> str:
    source = text(dict(content), "energy") or "not available"
    if not spent.joules:
        return f"energy {source}" if source.startswith("not available") else ""
    # Some ranks had no counter, or lost it.
    at_least = "at least " if spent.unmeasured_seconds else ""
    return f"{at_least}{spent.joules / _JOULES_PER_KWH:.3g} kWh"
