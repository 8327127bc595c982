"""Judge an image file by the structure of its bytes, which takes a few microseconds for the usual JPEG or PNG.

There are three verdicts:
    "direct": DALI decodes the bytes as they are, to the same pixels as Pillow's `convert("RGB")` (measured with DALI 2.4 on
        the CPU: no difference).
    "convert": a valid image of a rarer kind; `to_direct` makes a PNG of it.
    "bad": not an image, or an image whose structure is broken. It must never reach DALI, whose decoder may end the process
        on such bytes.
Images are used as stored: their EXIF orientation is ignored.
"""

import io
import re
import zlib
from typing import Literal, NamedTuple

from PIL import Image, UnidentifiedImageError

from trainer.errors import InputError

Kind = Literal["direct", "convert", "bad"]

# Only these of Pillow's readers are used: others start programs (EPS) or guess from very little (TGA).
PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM")
MAX_PIXELS = 178_956_970  # Pillow refuses larger images as decompression bombs; the same limit holds for DALI
# Each scan of a progressive JPEG passes over all pixels. Scans times pixels may be at most this many times the largest number
# of pixels. A usual progressive JPEG has 10 scans.
MOST_PASSES = 16
HEAD_BYTES = 16 * 1024  # enough for nearly all photographs: only EXIF data and colour profiles precede the size

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR_TYPES = (0, 2, 3, 4, 6)
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # inside a scan, 0xFF is followed only by 0 or a restart number
_JPEG_BETWEEN_SCANS = {0xC4, 0xDA, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # tables, further scans, comments


class ImageInfo(NamedTuple):
    """The verdict on one file."""

    kind: Kind
    format: str  # Pillow's name of the format
    height: int  # pixels as stored; 0 if the file is bad
    width: int
    problem: str = ""  # why the file is bad


# Parsing has two stages: up to the compressed pixels, and from there to the end of the file.
class _Structure(NamedTuple):
    """Facts from the bytes before the compressed pixels."""

    info: ImageInfo
    body: int  # offset of the compressed pixels in bytes


class _Body(NamedTuple):
    """Facts from the bytes between the start of the compressed pixels and the end of the file."""

    is_whole: bool
    scans: int = 1


def inspect_head(head: bytes) -> ImageInfo | None:
    """Judge a file by its first bytes, so that an index can be built without reading whole files.

    Returns None if these bytes are not enough; then pass the whole file to `inspect_image`. The end of the file is not checked.
    """
    structure = _parse_head(head)
    return structure.info if structure and structure.info.kind == "direct" else None


def inspect_image(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Judge a whole file. A file with more than `max_pixels` is bad. Never raises.

    A JPEG or PNG with a broken structure is decoded to see whether Pillow can read it. Damage that does not break the structure
    is found only by decoding.
    """
    structure = _parse_head(data)
    if structure is None:
        return _ask_pillow(data, False, max_pixels)
    # The body of the file must be intact as well.
    info = structure.info
    body = _BODIES[info.format](data, structure.body)
    if problem := _find_excess(info, body.scans, max_pixels):
        return _bad(problem)
    # The usual case: nothing has been decoded so far.
    if body.is_whole and info.kind == "direct":
        return info
    return _ask_pillow(data, body.is_whole, max_pixels)


def _bad(problem: str) -> ImageInfo:
    return ImageInfo("bad", "", 0, 0, problem)


def _find_excess(info: ImageInfo, scans: int, max_pixels: int) -> str:
    """Return why decoding would take too much memory or time, or an empty text."""
    pixels = info.height * info.width
    if pixels > max_pixels:
        return f"has {info.height}x{info.width} pixels, more than data.max_image_pixels {max_pixels:,}"
    # A small file with many scans may take minutes to decode.
    if scans * pixels > MOST_PASSES * max_pixels:
        return f"has {scans} scans of {info.height}x{info.width} pixels, {MOST_PASSES} times data.max_image_pixels"
    return ""


def to_direct(data: bytes) -> bytes:
    """Convert any readable image to a lossless 8-bit RGB PNG by Pillow's `convert("RGB")`.

    An animation gives its first frame. Raises InputError naming the problem.
    """
    return encode_png(decode_rgb(data))


def decode_rgb(data: bytes) -> Image.Image:
    """Decode any readable image by Pillow's `convert("RGB")`. Raises InputError naming the problem."""
    return _decode(data).convert("RGB")


def encode_png(image: Image.Image) -> bytes:
    """Encode an image as PNG without compression.

    The lowest compression level makes files 1.6 times smaller but takes twice as long to write and to decode.
    """
    png = io.BytesIO()
    image.info.clear()  # for example the transparent colour of another mode, which would make the PNG invalid
    image.save(png, "PNG", compress_level=0)
    return png.getvalue()


def _decode(data: bytes) -> Image.Image:
    try:
        image = _open(data)
        image.load()
    except (
        Exception
    ) as error:  # Pillow's readers raise nearly any type on damaged bytes; all of them mean "cannot be decoded"
        raise InputError(_describe_error(error, data)) from error
    return image


def _open(data: bytes) -> Image.Image:
    # Only the formats above: a file must not choose its reader freely.
    return Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)


def _ask_pillow(data: bytes, is_whole: bool, max_pixels: int) -> ImageInfo:
    """Judge a file by Pillow: by its header alone, or by a full decode for a JPEG or PNG whose structure looks broken."""
    try:
        image = _open(data)
        info = ImageInfo("convert", image.format or "", image.height, image.width)
        if problem := _find_excess(info, 1, max_pixels):
            return _bad(problem)
        if not is_whole and image.format in ("JPEG", "MPO", "PNG"):
            image.load()
    except Exception as error:  # any type, as in `_decode`
        return _bad(_describe_error(error, data))
    return info


def _describe_error(error: Exception, data: bytes) -> str:
    if not data:
        return "empty file"
    if isinstance(error, UnidentifiedImageError):  # Pillow's own text names a memory address
        return f"not a readable image ({len(data)} bytes, the first are {data[:12]!r})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"


def _parse_head(data: bytes) -> _Structure | None:
    """Parse a JPEG or PNG up to the compressed pixels. Return None for other formats and if it is broken before them."""
    try:
        if data.startswith(b"\xff\xd8"):
            return _parse_jpeg(data)
        if data.startswith(_PNG_SIGNATURE):
            return _parse_png(data)
    except IndexError:  # the data ended before the pixels
        pass
    return None


def _parse_jpeg(data: bytes) -> _Structure | None:
    """Parse the marker segments up to the first start of scan (ITU-T T.81, annex B).

    Returns None if there are other bytes between the segments, which DALI refuses.
    """
    # Each segment consists of 0xFF, a marker, its length in two bytes, and its contents.
    info = None
    position = 2
    while data[position] == 0xFF:
        while data[position] == 0xFF:  # fill bytes may precede a marker
            position += 1
        marker = data[position]
        length = data[position + 1] << 8 | data[position + 2]
        # start of scan: the compressed pixels follow this segment
        if marker == 0xDA:
            return _Structure(info, position + 1 + length) if info else None
        # a marker without a segment, which is not allowed before a scan
        if marker < 0xC0 or 0xD0 <= marker <= 0xD9 or length < 2:
            return None
        # start of frame
        if marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            info = _jpeg_frame(data, marker, position + 3)
        position += 1 + length
    return None


def _jpeg_frame(data: bytes, marker: int, position: int) -> ImageInfo:
    """Read the size and the kind of a JPEG from its frame header, whose fields begin at `position`."""
    bits = data[position]
    height = data[position + 1] << 8 | data[position + 2]
    width = data[position + 3] << 8 | data[position + 4]
    components = data[position + 5]
    # baseline, extended or progressive JPEG with Huffman coding, in colour or grey
    is_usual = marker <= 0xC2 and bits == 8 and components in (1, 3)
    is_direct = is_usual and _size_is_sane(height, width)
    return ImageInfo("direct" if is_direct else "convert", "JPEG", height, width)


def _jpeg_body(data: bytes, body: int) -> _Body:
    """Check that only allowed segments follow the first scan, up to the end marker, and count the scans."""
    scans = 1
    while found := _JPEG_MARKER.search(data, body):
        body = found.end()
        marker = data[body - 1]
        if marker == 0xD9:
            return _Body(True, scans)
        if marker not in _JPEG_BETWEEN_SCANS:
            return _Body(False, scans)
        # A start of scan: the compressed pixels follow its segment.
        scans += marker == 0xDA
        body += int.from_bytes(data[body : body + 2], "big")
    return _Body(False, scans)


def _parse_png(data: bytes) -> _Structure | None:
    """Parse the chunks up to the first IDAT.

    DALI and Pillow decode alpha, palettes and interlacing to the same pixels, but not 16 bits per channel.
    """
    # The first chunk, IHDR, has its fields at fixed positions.
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    bits = data[24]
    colour_type = data[25]
    interlace = data[28]
    is_usual_type = bits <= 8 and colour_type in _PNG_COLOUR_TYPES and interlace <= 1
    is_usual = data[12:16] == b"IHDR" and is_usual_type
    has_palette = False
    position = 33  # end of the IHDR chunk
    while (chunk := data[position + 4 : position + 8]) != b"IDAT":
        if chunk == b"acTL":  # an animation: only decoding tells whether its frame sequence is sound
            return None
        has_palette = has_palette or chunk == b"PLTE"
        # A chunk has 12 bytes besides its data: length, type and checksum.
        length = int.from_bytes(data[position : position + 4], "big")
        position += 12 + length
        data[position]  # raises IndexError at the end of the data
    # colour type 3 takes its colours from a palette
    is_usual = is_usual and (has_palette or colour_type != 3)
    is_direct = is_usual and _size_is_sane(height, width)
    return _Structure(ImageInfo("direct" if is_direct else "convert", "PNG", height, width), position)


def _png_body(data: bytes, body: int) -> _Body:
    """Check that all chunks up to IEND follow each other with correct checksums.

    DALI refuses any wrong checksum; Pillow accepts some of them.
    """
    # A memoryview avoids copying each chunk for its checksum.
    view = memoryview(data)
    position = len(_PNG_SIGNATURE)
    while position + 12 <= len(data):
        length = int.from_bytes(view[position : position + 4], "big")
        end = position + 12 + length
        checksum = int.from_bytes(view[end - 4 : end], "big")
        if zlib.crc32(view[position + 4 : end - 4]) != checksum:
            return _Body(False)
        if view[position + 4 : position + 8] == b"IEND":
            return _Body(True)
        position = end
    return _Body(False)


# How to check the rest of a file, by format.
_BODIES = {"JPEG": _jpeg_body, "PNG": _png_body}


def _size_is_sane(height: int, width: int) -> bool:
    return 0 < height * width <= MAX_PIXELS
