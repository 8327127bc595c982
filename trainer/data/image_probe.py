"""Judge an image file by the structure of its bytes: a few microseconds for the usual JPEG or PNG.

Three verdicts. "direct": DALI decodes the bytes as they are, to the same pixels as Pillow's `convert("RGB")` (measured with
DALI 2.4 on the CPU: no difference). "convert": a valid picture of a rarer kind; `to_direct` makes a PNG of it. "bad": not an
image, or one whose structure is broken; it must never reach DALI, whose decoder may end the process on such bytes.
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
MAX_PIXELS = 178_956_970  # Pillow refuses larger pictures as decompression bombs; one rule for both decoders
# a progressive JPEG's scans times its pixels may be this many times the largest number of pixels; usual ones have 10 scans
MOST_PASSES = 16
HEAD_BYTES = 16 * 1024  # enough for nearly all photographs: only EXIF data and colour profiles precede the size

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_COLOUR_TYPES = (0, 2, 3, 4, 6)
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # in a scan 0xFF stands only before 0 or a restart's number
_JPEG_BETWEEN_SCANS = {0xC4, 0xDA, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # tables, further scans, comments


class ImageInfo(NamedTuple):
    """Verdict on one file. `format` is Pillow's name; height and width are pixels as stored (0 where bad)."""

    kind: Kind
    format: str
    height: int
    width: int
    problem: str = ""


class _Structure(NamedTuple):
    info: ImageInfo
    body: int  # offset of the compressed pixels


class _Body(NamedTuple):
    is_whole: bool
    scans: int = 1


def inspect_head(head: bytes) -> ImageInfo | None:
    """Judge a file by its first bytes, to build an index without reading whole files.

    None if they are not enough: then pass the whole file to `inspect_image`. The end of the file is not checked.
    """
    structure = _walk(head)
    return structure.info if structure and structure.info.kind == "direct" else None


def inspect_image(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Judge a whole file; it is bad if it has more than `max_pixels`. Never raises.

    A JPEG or PNG with a broken structure is decoded to see whether Pillow reads it. Damage that leaves the structure whole
    is found only by decoding.
    """
    structure = _walk(data)
    body = _BODIES[structure.info.format](data, structure.body) if structure else _Body(False)
    if structure and (problem := _is_too_much(structure.info, body.scans, max_pixels)):
        return ImageInfo("bad", "", 0, 0, problem)
    if structure and body.is_whole and structure.info.kind == "direct":
        return structure.info
    return _ask_pillow(data, body.is_whole, max_pixels)


def _is_too_much(info: ImageInfo, scans: int, max_pixels: int) -> str:
    """Return why decoding would take too much memory or time, or an empty text."""
    pixels = info.height * info.width
    if pixels > max_pixels:
        return f"has {info.height}x{info.width} pixels, more than data.max_image_pixels {max_pixels:,}"
    if scans * pixels > MOST_PASSES * max_pixels:  # each scan goes over all pixels: a small file may take minutes
        return f"has {scans} scans of {info.height}x{info.width} pixels, {MOST_PASSES} times data.max_image_pixels"
    return ""


def to_direct(data: bytes) -> bytes:
    """Convert any readable image to a lossless 8-bit RGB PNG by Pillow's `convert("RGB")`; of an animation the first frame.

    Raises InputError naming the problem.
    """
    return encode_png(decode_rgb(data))


def decode_rgb(data: bytes) -> Image.Image:
    """Decode any readable image by Pillow's `convert("RGB")`. Raises InputError naming the problem."""
    return _decode(data).convert("RGB")


def encode_png(image: Image.Image) -> bytes:
    """PNG without compression: 1.6 times the bytes of the lowest level, but half the time to write and to decode."""
    png = io.BytesIO()
    image.info.clear()  # such as the transparent colour of another mode, which would make the PNG invalid
    image.save(png, "PNG", compress_level=0)
    return png.getvalue()


def _decode(data: bytes) -> Image.Image:
    try:
        image = _open(data)
        image.load()
    except Exception as error:  # Pillow's readers raise nearly any type on damaged bytes: all mean "cannot be decoded"
        raise InputError(_problem(error, data)) from error
    return image


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)


def _ask_pillow(data: bytes, whole: bool, max_pixels: int) -> ImageInfo:
    """Judge a file by Pillow: by its header alone, or by a full decode for a JPEG or PNG whose structure looks broken."""
    try:
        image = _open(data)
        size = ImageInfo("convert", image.format or "", image.height, image.width)
        if problem := _is_too_much(size, 1, max_pixels):
            return ImageInfo("bad", "", 0, 0, problem)
        if not whole and image.format in ("JPEG", "MPO", "PNG"):
            image.load()
    except Exception as error:  # as in _decode
        return ImageInfo("bad", "", 0, 0, _problem(error, data))
    return size


def _problem(error: Exception, data: bytes) -> str:
    if not data:
        return "empty file"
    if isinstance(error, UnidentifiedImageError):  # Pillow's own text names a memory address
        return f"not a readable image ({len(data)} bytes, the first are {data[:12]!r})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _walk(data: bytes) -> _Structure | None:
    """Parse a JPEG or PNG up to the compressed pixels; None if it is neither or is broken before them."""
    try:
        if data.startswith(b"\xff\xd8"):
            return _walk_jpeg(data)
        if data.startswith(_PNG_SIGNATURE):
            return _walk_png(data)
    except IndexError:  # ended before the pixels
        pass
    return None


def _walk_jpeg(data: bytes) -> _Structure | None:
    """Marker segments up to the first start of scan (ITU-T T.81, annex B). Junk between segments: DALI refuses it."""
    info = None
    position = 2
    while data[position] == 0xFF:
        while data[position] == 0xFF:  # fill bytes may stand before a marker
            position += 1
        marker = data[position]
        length = data[position + 1] << 8 | data[position + 2]
        if marker == 0xDA:
            return _Structure(info, position + 1 + length) if info else None
        if marker < 0xC0 or 0xD0 <= marker <= 0xD9 or length < 2:  # a marker without a segment: not before a scan
            return None
        if marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            info = _jpeg_frame(data, marker, position + 3)
        position += 1 + length
    return None


def _jpeg_frame(data: bytes, marker: int, position: int) -> ImageInfo:
    bits, components = data[position], data[position + 5]
    height = data[position + 1] << 8 | data[position + 2]
    width = data[position + 3] << 8 | data[position + 4]
    usual = marker <= 0xC2 and bits == 8 and components in (1, 3)  # baseline, extended or progressive Huffman
    return ImageInfo("direct" if usual and _size_is_sane(height, width) else "convert", "JPEG", height, width)


def _jpeg_body(data: bytes, body: int) -> _Body:
    """Check that only allowed segments follow the first scan, up to the end marker, and count the scans."""
    scans = 1
    while found := _JPEG_MARKER.search(data, body):
        marker, body = data[found.end() - 1], found.end()
        if marker == 0xD9:
            return _Body(True, scans)
        if marker not in _JPEG_BETWEEN_SCANS:
            return _Body(False, scans)
        scans += marker == 0xDA
        body += int.from_bytes(data[body : body + 2], "big")
    return _Body(False, scans)


def _walk_png(data: bytes) -> _Structure | None:
    """Chunks up to the first IDAT. Alpha, palette and interlacing are equal in DALI and Pillow, 16 bits are not."""
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    bits = data[24]
    colour_type = data[25]
    interlace = data[28]
    usual = data[12:16] == b"IHDR" and bits <= 8 and colour_type in _PNG_COLOUR_TYPES and interlace <= 1
    palette = False
    position = 33
    while (chunk := data[position + 4 : position + 8]) != b"IDAT":
        if chunk == b"acTL":  # an animation: only decoding tells whether its frame sequence is sound
            return None
        palette = palette or chunk == b"PLTE"
        length = int.from_bytes(data[position : position + 4], "big")
        position += 12 + length
        data[position]  # raises IndexError at the end
    usual = usual and (palette or colour_type != 3)
    direct = usual and _size_is_sane(height, width)
    return _Structure(ImageInfo("direct" if direct else "convert", "PNG", height, width), position)


def _png_body(data: bytes, body: int) -> _Body:
    """Whether all chunks up to IEND follow each other with right checksums: DALI refuses wrong ones, Pillow not all."""
    view = memoryview(data)
    position = len(_PNG_SIGNATURE)
    while position + 12 <= len(data):
        end = position + 12 + int.from_bytes(view[position : position + 4], "big")
        if zlib.crc32(view[position + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            return _Body(False)
        if view[position + 4 : position + 8] == b"IEND":
            return _Body(True)
        position = end
    return _Body(False)


_BODIES = {"JPEG": _jpeg_body, "PNG": _png_body}


def _size_is_sane(height: int, width: int) -> bool:
    return 0 < height * width <= MAX_PIXELS
