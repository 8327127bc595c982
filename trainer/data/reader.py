"""Read and check the bytes of single images for DALI, and retry after temporary faults of a network file system.

`waiting_for` tells which images are being read and for how long, because a file system that hangs raises no error.
"""

from __future__ import annotations

import errno
import logging
import threading
import time

from trainer.data.image_probe import MAX_PIXELS, inspect_image, to_direct
from trainer.data.index import Index
from trainer.data.printable import printable
from trainer.data.stage_times import StageTimes
from trainer.errors import InputError
from trainer.files import refuse_machine_fault

RETRY_PAUSES = (0.1, 1.0)  # seconds before the second and the third try
TEMPORARY_FAULTS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,  # NFS: the server was restarted, or the file was replaced there
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
        errno.ESHUTDOWN,  # Lustre: the server evicted this client
    }
)

_log = logging.getLogger(__name__)


class ImageReader:
    """Reads the images of an index. Safe to use from many threads."""

    def __init__(self, index: Index, max_pixels: int = MAX_PIXELS) -> None:
        self.index = index
        self.max_pixels = max_pixels
        self.refused_by_dali: set[int] = set()
        """Ids of the images that Pillow has to convert although their structure is sound."""
        # Thread -> (image, start of the read). No lock is needed, because each thread only writes its own entry.
        self._reading: dict[int, tuple[int, float]] = {}
        self._logged_temporary_fault = False
        self.stages = StageTimes()
        """Seconds of all threads in "read" and "check"."""

    def read(self, image_id: int) -> tuple[bytes, str | None]:
        """Return (bytes that DALI decodes, None), or (no bytes, what is wrong with the image).

        Raises InputError if the machine is at fault and not the image.
        """
        try:
            with self.stages.spend("read"):
                data = self._read_stored(image_id)
        except OSError as error:
            # If the machine is at fault, no image may be blamed.
            refuse_machine_fault(error)
            return b"", str(error)
        with self.stages.spend("check"):
            return self._checked(image_id, data)

    def _checked(self, image_id: int, data: bytes) -> tuple[bytes, str | None]:
        """Return what `read` does, from the bytes of the file."""
        # Bytes that are not an image must not reach DALI.
        info = inspect_image(data, self.max_pixels)
        if info.kind == "bad":
            return b"", info.problem
        # The crop windows are computed from the size in the index, so the file must still have that size.
        height = int(self.index.heights[image_id])
        width = int(self.index.widths[image_id])
        if (info.height, info.width) != (height, width):
            return b"", f"is {info.height}x{info.width} pixels, but was {height}x{width} when the index was built"
        if info.kind == "direct" and image_id not in self.refused_by_dali:
            return data, None
        try:
            return to_direct(data), None
        except InputError as error:
            return b"", str(error)

    def waiting_for(self) -> list[tuple[str, float]]:
        """Return (name, seconds) of each image that is being read now, longest first. Any thread may call this."""
        now = time.monotonic()
        # copy() is atomic, so no other thread can change the dictionary while it is copied.
        # The oldest read comes first.
        reading = sorted(self._reading.copy().values(), key=lambda item: item[1])
        return [(self.index.name(image_id), now - since) for image_id, since in reading]

    def _read_stored(self, image_id: int) -> bytes:
        """Read the image's bytes; `waiting_for` shows the image in the meantime."""
        # Note what this thread reads and since when.
        thread = threading.get_ident()
        self._reading[thread] = image_id, time.monotonic()
        try:
            return self._read_with_retries(image_id)
        finally:
            del self._reading[thread]

    def _read_with_retries(self, image_id: int) -> bytes:
        """Read the image's bytes, and try again after a temporary fault. Raises OSError if no try succeeds."""
        failed: OSError | None = None
        # The last try has no pause after it.
        for pause in (*RETRY_PAUSES, None):
            try:
                data = self.index.read(image_id)
            except OSError as error:
                # Retrying does not help against a missing file or missing rights.
                if error.errno not in TEMPORARY_FAULTS:
                    raise
                failed = error
            else:
                if failed is not None:
                    self._log_temporary_fault(failed)
                return data
            if pause is not None:
                time.sleep(pause)
        raise OSError(f"{failed} ({len(RETRY_PAUSES) + 1} tries)") from failed

    def _log_temporary_fault(self, error: OSError) -> None:
        """Log the first temporary fault of this run."""
        if self._logged_temporary_fault:
            return
        self._logged_temporary_fault = True
        _log.warning(
            "%s, but a later try succeeded: a temporary fault of the file system; further ones are not logged",
            printable(str(error)),
        )
