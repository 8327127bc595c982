"""Time the loader or the whole loop on drawn images: python -m tests.gpu.time_images OUT.json loader|end2end FOLDER [--tiny]

loader: batches alone, and how busy that keeps the GPU's JPEG engine. end2end: the real loop, where the time of a step goes, and
the same step alone. FOLDER: from tests.gpu.make_set.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

from tests.gpu.part import Line, Task, main
from tests.gpu.time_step import RECIPE, TINY
from trainer.bench.end2end import bench_end2end
from trainer.bench.loader import bench_loader
from trainer.bench.timing import spread
from trainer.config.schema import Config
from trainer.loop import train

SAMPLE = ["nvidia-smi", "--query-gpu=utilization.jpeg", "--format=csv,noheader,nounits", "--loop-ms=200"]


def time_images(task: Task) -> Iterator[Line]:
    """Yield the lines of the kind that the command names."""
    kind, folder = task.words
    config = TINY if task.tiny else RECIPE
    config = replace(config, data=replace(config.data, root=folder), log=replace(config.log, tensorboard=False))
    yield from (loader if kind == "loader" else end2end)(config, task)


def loader(config: Config, task: Task) -> Iterator[Line]:
    """Yield views a second, and how busy the JPEG engine is meanwhile."""
    try:
        samples = subprocess.Popen(SAMPLE, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        samples = None
    result = bench_loader(config, 0.5 if task.tiny else 16.0)
    yield {"name": "loader", "said": f"{result['views_per_s']:,.0f} views/s", **result}
    if samples is None:
        return
    samples.terminate()
    percent = [float(line) for line in samples.communicate()[0].splitlines() if line.strip().isdigit()]
    if len(percent) > 1:
        figure = spread(percent)
        yield {"name": "JPEG engine", "said": f"{figure['median']:.0f} % busy", "percent": figure}


def end2end(config: Config, task: Task) -> Iterator[Line]:
    """Yield views a second of the loop, its share of the step alone, and the parts of a profiled step."""
    result = bench_end2end(config, 1.0 if task.tiny else 40.0, train)
    assert result is not None
    said = f"{result['views_per_s']:,.0f} views/s, {result['share_of_compute']:.0%} of the step alone"
    yield {"name": "end2end", "said": said, **result}
    percent = {name: round(value, 1) for name, value in result["step"]["percent"].items() if value >= 1}
    yield {"name": "a step's percent", "said": ", ".join(f"{name} {value}" for name, value in percent.items())}


if __name__ == "__main__":
    main(time_images, __doc__)
