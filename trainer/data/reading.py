"""One image's bytes, checked, as DALI can have them; passing faults of a network file system are waited out.

Which thread reads what, and since when, can be asked at any time: a file system that hangs raises nothing.
"""

from __future__ import annotations

import errno
import logging
import threading
import time

from trainer.data.formats import MAX_PIXELS, inspect_image, to_direct
from trainer.data.index import Index
from trainer.data.printable import printable
from trainer.errors import InputError
from trainer.files import refuse_machine_fault

RETRY_PAUSES = (0.1, 1.0)  # seconds before the second and the third try
PASSING_FAULTS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,  # a server of NFS was restarted, or the file replaced there
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.EREMOTEIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ENOTCONN,  # FUSE: its process is being restarted
        errno.ESHUTDOWN,  # Lustre: the server put this client out
    }
)

_log = logging.getLogger(__name__)


class ImageReader:
    """Reads images of an index. Safe to use from many threads."""

    def __init__(self, index: Index, max_pixels: int = MAX_PIXELS) -> None:
        self.index = index
        self.max_pixels = max_pixels
        self.refused_by_dali: set[int] = set()
        """Images that are converted though their structure is sound."""
        # thread -> (image, since when). Each thread writes its own entry only: no lock
        self._reading: dict[int, tuple[int, float]] = {}
        self._said_passing = False

    def read(self, image_id: int) -> tuple[bytes, str | None]:
        """Bytes that DALI decodes, and None; or what is wrong with the image.

        Raises InputError where the machine is at fault, and not the image."""
        try:
            data = self._read_stored(image_id)
        except OSError as error:
            refuse_machine_fault(error)
            return b"", str(error)
        info = inspect_image(data, self.max_pixels)
        if info.kind == "bad":
            return b"", info.problem
        expected = int(self.index.heights[image_id]), int(self.index.widths[image_id])
        if (info.height, info.width) != expected:
            return b"", f"is {info.height}x{info.width} pixels, {expected[0]}x{expected[1]} when the index was built"
        try:
            return (to_direct(data) if info.kind == "convert" or image_id in self.refused_by_dali else data), None
        except InputError as error:
            return b"", str(error)

    def waiting_for(self) -> list[tuple[str, float]]:
        """(name, seconds) of each image that is being read just now, the longest first; from any thread, at any time."""
        now = time.monotonic()
        reading = sorted(
            self._reading.copy().values(), key=lambda item: item[1]
        )  # copy() is one step, no thread between
        return [(self.index.name(image_id), now - since) for image_id, since in reading]

    def _read_stored(self, image_id: int) -> bytes:
        thread = threading.get_ident()
        self._reading[thread] = image_id, time.monotonic()
        try:
            return self._read_patiently(image_id)
        finally:
            del self._reading[thread]

    def _read_patiently(self, image_id: int) -> bytes:
        failed: OSError | None = None
        for pause in (*RETRY_PAUSES, None):
            try:
                data = self.index.read(image_id)
            except OSError as error:
                if error.errno not in PASSING_FAULTS:
                    raise
                failed = error
            else:
                if failed is not None and not self._said_passing:
                    self._said_passing = True
                    _log.warning(
                        "%s, but another try read it: a passing fault of the file system; more are not named",
                        printable(str(failed)),
                    )
                return data
            if pause is not None:
                time.sleep(pause)
        raise OSError(f"{failed} ({len(RETRY_PAUSES) + 1} tries)") from failed
