"""Reads the files of coming steps ahead of need, has DALI draw their views, and hands them over as one tensor.

Readers (threads) -> one thread that checks the bytes and computes the graph's inputs -> DALI -> view-major buffer.
A file that is not an image never reaches DALI. An image that can't be used is named once and replaced by the next one of the
set: that depends on the files alone, so that every restart and any number of ranks replaces it by the same image.

Shapes: N images of this rank in the step, d views, S pixels a side.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.dali_graph import Placement, eval_arrays, view_arrays, view_pipeline
from trainer.data.decode_cache import DecodeCache
from trainer.data.decoding import decode, decode_by_dali
from trainer.data.image_probe import decode_rgb
from trainer.data.index import Index
from trainer.data.plan import Planner
from trainer.data.printable import printable
from trainer.data.quarantine import BadImages, read_quarantine
from trainer.data.reader import ImageReader
from trainer.distributed.cores import own_cores
from trainer.errors import InputError

GPU_THREADS = 8  # of DALI, where the JPEG engine decodes and the SMs do the rest
HELD_BATCHES = 3  # whose copies a GPU may still owe; a training loop reads its results two steps late
RESERVED_BYTES = 2 << 30

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """What a step asks of the loader."""

    image_ids: NDArray[np.int64]  # (N,)
    arrays: Callable[[NDArray, NDArray], list[NDArray]]  # heights, widths (N,) -> the graph's inputs after the images


class Batch(NamedTuple):
    """What the loader hands over. `views` is overwritten by the next batch."""

    step: int
    views: torch.Tensor  # (d*N, 3, S, S) uint8, channels_last, view-major, on the device
    image_ids: NDArray[np.int64]  # (N,) images shown; differs from those asked for where one was replaced
    wait_seconds: float  # how long the taker waited


class Prepared(NamedTuple):
    step: int
    image_ids: NDArray[np.int64]
    arrays: list[Any]


def dali_threads(config: DataConfig, *, on_gpu: bool) -> int:
    """Threads of DALI on this rank."""
    return config.threads or (min(GPU_THREADS, own_cores()) if on_gpu else own_cores())


def largest_sides(index: Index, max_pixels: int, batch_size: int) -> tuple[int, int]:
    """Largest width and height of the images that may be read, for `Placement.decoder_hint`.

    nvJPEG is given both, and the size of a batch. Its manual does not say whether it reserves memory for each image of the
    batch: for 256 images of 6000 x 6000 that would be 28 GB. So no size is longer than that of squares which take
    RESERVED_BYTES a batch; for a larger image nvJPEG allocates once more, from DALI's pool.
    """
    heights, widths = np.asarray(index.heights, np.int64), np.asarray(index.widths, np.int64)
    usable = heights * widths <= max_pixels
    longest = math.isqrt(RESERVED_BYTES // (3 * batch_size))
    width, height = (int(sizes[usable].max(initial=1)) for sizes in (widths, heights))
    return min(width, longest), min(height, longest)


def size_at(sizes: Sequence[tuple[int, int]], step: int) -> int:
    """The views' size in a step. sizes: (first step, size), the first from step 0 on."""
    return next(size for first, size in reversed(sizes) if step >= first)


def train_requests(planner: Planner, sizes: Sequence[tuple[int, int]] = ()) -> Callable[[int], Request]:
    """The requests of a training run: the plan of each step. sizes: as for `ViewLoader`; a smaller view is the same view
    drawn smaller, its blur, too."""

    def request(step: int) -> Request:
        plan = planner.plan(step)
        if sizes:
            plan = plan._replace(blur_sigma=plan.blur_sigma * (size_at(sizes, step) / planner.recipe.size))
        return Request(plan.image_ids, lambda heights, widths: view_arrays(plan, planner.recipe, heights, widths))

    return request


def eval_requests(recipe: ViewsConfig, image_ids: NDArray[np.int64], batch_size: int) -> Callable[[int], Request]:
    """The requests of an evaluation: `image_ids` in order, one centre crop each; the last batch may be short."""

    def request(step: int) -> Request:
        ids = image_ids[step * batch_size : (step + 1) * batch_size]
        return Request(ids, lambda heights, widths: eval_arrays(recipe, heights, widths))

    return request


class ViewLoader:
    """Iterates over the batches of steps first_step <= step < end_step, in order; one iteration at a time.

    Threads and pipeline live as long as the iteration. An error of a reader is raised when its step's turn comes.
    sizes: (first step, size of the views from there on), the first from step 0; none: always the recipe's. A new size is a new
    pipeline, whose first batch nothing was read ahead for.
    cache: keeps the images decoded; None: every batch is decoded.
    quarantine: RUN_DIR/quarantine.jsonl, whose entries before first_step are known from the start and to which `rank`
    appends; None: nothing is known, nothing written.
    """

    def __init__(
        self,
        index: Index,
        recipe: ViewsConfig,
        config: DataConfig,
        requests: Callable[[int], Request],
        *,
        batch_size: int,
        device: torch.device,
        first_step: int,
        end_step: int,
        sizes: Sequence[tuple[int, int]] = (),
        cache: DecodeCache | None = None,
        quarantine: Path | None = None,
        rank: int = 0,
    ) -> None:
        self._sizes, self._cache = tuple(sizes) or ((0, recipe.size),), cache
        self.index = index
        self.recipe = recipe
        self.requests = requests
        self.first_step = first_step
        self.end_step = end_step
        self.batch_size = batch_size
        known = read_quarantine(quarantine, first_step) if quarantine else {}
        self.bad = BadImages(index, config.max_skipped_share, known, quarantine, rank)
        self._reader = ImageReader(index, config.max_image_pixels)
        on_gpu, hint = device.type == "cuda", config.decoder_hint
        if on_gpu and not all(hint):
            hint = largest_sides(index, config.max_image_pixels, batch_size)
        self._place = Placement(
            device.index or 0 if on_gpu else None,
            dali_threads(config, on_gpu=on_gpu),
            config.prefetch_batches,
            config.hw_decoder_load,
            hint,
        )
        self._num_readers = config.threads or own_cores()
        self._ahead = config.read_ahead_steps
        self._pipe: Any = None
        self._held: deque[tuple[Any, torch.cuda.Event]] = deque()  # DALI's outputs and the end of their copy
        self._device = device

    def __iter__(self) -> Iterator[Batch]:
        self._readers = ThreadPoolExecutor(self._num_readers, "read")
        self._preparer = ThreadPoolExecutor(1, "prepare")
        self._source_error: Exception | None = None
        try:
            self._start(self.first_step)
            for step in range(self.first_step, self.end_step):
                began = time.perf_counter()
                if step == self._stop_step:
                    self._start(step)
                outputs, prepared = self._run(step)
                views = self._collect(outputs, len(prepared.image_ids))
                yield Batch(step, views, prepared.image_ids, time.perf_counter() - began)
        finally:
            for pool in (self._preparer, self._readers):
                pool.shutdown(wait=True, cancel_futures=True)
            self._let_go(0)
            self._pipe = None

    def waiting_for(self) -> list[tuple[str, float]]:
        """(name, seconds) of each image that a reader is waiting for just now, the longest first; from any thread."""
        return self._reader.waiting_for()

    def _start(self, step: int) -> None:
        """From a step on, as far as the views keep their size."""
        self._let_go(0)
        size = size_at(self._sizes, step)
        self._stop_step = min([self.end_step, *(first for first, _ in self._sizes if first > step)])
        recipe = replace(self.recipe, size=size)
        # one is enough: on a GPU a batch is copied in the order of the stream that works on the one before
        shape = (recipe.num_views * self.batch_size, size, size, 3)
        self._buffer = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._next_step = step
        self._coming: deque[Future[Prepared]] = deque()
        self._fed: deque[Prepared] = deque()
        decoded = self._cache is not None
        self._pipe = view_pipeline(recipe, self.batch_size, self._place, self._source, decoded=decoded)

    def _source(self) -> list[Any]:
        """Called by DALI, in the thread that runs the pipeline, for each batch."""
        while len(self._coming) <= self._ahead and self._next_step < self._stop_step:
            self._coming.append(self._preparer.submit(self._prepare, self._next_step))
            self._next_step += 1
        if not self._coming:
            raise StopIteration
        try:
            prepared = self._coming.popleft().result()
        except Exception as error:
            self._source_error = error
            raise
        self._fed.append(prepared)
        return prepared.arrays

    def _run(self, step: int) -> tuple[Any, Prepared]:
        """DALI's outputs for the step. A file whose damage only the decoder sees costs a new pipeline, not the run; nor does a
        batch that fails once, though each of its images can be decoded."""
        while True:
            try:
                outputs = self._pipe.run()
                return outputs, self._fed.popleft()
            except RuntimeError as error:
                if error is self._source_error:  # a reader's, not DALI's
                    raise
                if not self._find_refused() and not self._refuse_batch(step, error):
                    raise RuntimeError(f"DALI failed in step {step}, though every image decodes: {error}") from error
                for future in self._coming:
                    future.cancel()
                self._start(step)

    def _find_refused(self) -> bool:
        """Decode the images of the batches given to DALI one by one; convert or replace those it refuses. Return whether it
        did any."""
        if self._cache is not None:  # DALI was given pixels
            return False
        given = [
            (prepared.step, int(image_id), data)
            for prepared in self._fed
            for image_id, data in zip(prepared.image_ids, prepared.arrays[0], strict=True)
        ]
        refused = list(self._readers.map(lambda item: self._is_refused(*item), given))
        return any(refused)

    def _refuse_batch(self, step: int, error: RuntimeError) -> bool:
        """Have Pillow decode the images of the failed batch from now on. Return False where that was done already, and where
        DALI was given pixels or nothing."""
        ids = set(self._fed[0].image_ids.tolist()) if self._fed else set()
        if self._cache is not None or ids <= self._reader.refused_by_dali:
            return False
        _log.warning(
            "DALI failed in step %d, though it decodes each of the %d images alone; Pillow decodes them now. DALI's error: %s",
            step,
            len(ids),
            printable(str(error)),
        )
        self._reader.refused_by_dali |= ids
        return True

    def _is_refused(self, step: int, image_id: int, data: NDArray[np.uint8]) -> bool:
        if decode_by_dali(data.tobytes(), on_gpu=self._place.device_id is not None) is not None:
            return False
        try:
            decode_rgb(data.tobytes())
            self._reader.refused_by_dali.add(image_id)
        except InputError as error:
            self.bad.add(image_id, str(error), step)
        return True

    def _prepare(self, step: int) -> Prepared:
        request = self.requests(step)
        self.bad.images_read += len(request.image_ids)
        usable = list(self._readers.map(partial(self._usable, step), request.image_ids.tolist()))
        ids = np.array([image_id for image_id, _ in usable], dtype=np.int64)
        arrays = request.arrays(self.index.heights[ids], self.index.widths[ids])
        return Prepared(step, ids, [[data for _, data in usable], *arrays])

    def _usable(self, step: int, image_id: int) -> tuple[int, NDArray[np.uint8]]:
        """The image, or the next one of the set that can be used: bytes that DALI decodes or, with a cache, pixels."""
        for offset in range(len(self.index)):
            candidate = (image_id + offset) % len(self.index)
            if candidate not in self.bad.ids:
                data, problem = self._load(candidate)
                if problem is None:
                    return candidate, data
                self.bad.add(candidate, problem, step)
        raise InputError("no image of the set can be used; run `wmse check-data` on it")

    def _load(self, image_id: int) -> tuple[NDArray[np.uint8], str | None]:
        if self._cache is not None and (pixels := self._cache.get(image_id)) is not None:
            return pixels, None
        data, problem = self._reader.read(image_id)
        if problem is None and self._cache is not None:
            try:
                return self._cache.put(image_id, decode(data)), None
            except InputError as error:
                problem = str(error)
        return np.frombuffer(data, np.uint8), problem

    def _collect(self, outputs: Any, count: int) -> torch.Tensor:
        """The view-major tensor of a batch: the one copy of the pixels."""
        buffer = self._buffer[: self.recipe.num_views * count]
        for view, output in enumerate(outputs):
            buffer[view * count : (view + 1) * count].copy_(torch.from_dlpack(output.as_tensor()))
        if self._device.type == "cuda":
            copied = torch.cuda.Event(blocking=True)
            copied.record(torch.cuda.current_stream(self._device))
            self._held.append((outputs, copied))
            self._let_go(HELD_BATCHES)
        return buffer.permute(0, 3, 1, 2)

    def _let_go(self, keep: int) -> None:
        """Give DALI the outputs back, but for the last `keep` batches', once the device has copied them: DALI writes over them
        in the order of its own stream, which knows nothing of torch's."""
        while len(self._held) > keep:
            _, copied = self._held[0]
            copied.synchronize()
            self._held.popleft()
