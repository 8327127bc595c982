"""Settings of the prices by which a run reports its cost (docs/cost.md)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.setting import setting


@dataclass(frozen=True)
class CostConfig:
    """Prices, to report the cost of a run. They change nothing else."""

    price_per_device_hour: float = setting(0.0, between=(0, None), shapes_result=False)
    """Price of an hour of one GPU; on a CPU, of an hour of one core. 0: none."""
    price_per_kwh: float = setting(0.0, between=(0, None), shapes_result=False)
    """Price of a kilowatt-hour of the energy that the counters of the devices show. 0: none."""
    currency: str = setting("USD", shapes_result=False)
    """Name of the currency of both prices."""
