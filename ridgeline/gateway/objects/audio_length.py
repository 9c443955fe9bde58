"""The length of an audio file, read from its container: WAV, FLAC, MP3, Ogg, MP4 (m4a) and WebM.

Reads only headers, and the end of Ogg and MP4: less than 1 ms for a file of any size. The header's length is
checked against the file's size, so a false header cannot turn an hour into a second.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

HEAD_BYTES = 64 << 10
MOST_BYTES_PER_S = 192_000  # stereo PCM at 48 kHz: compressed audio has fewer bytes per second
GUESSED_BYTES_PER_S = 4_000  # 32 kbit/s, for speech in a container without a length
MOST_ATOMS = 64

ReadAt = Callable[[int, int], bytes]  # (offset, most bytes)
Measure = Callable[[ReadAt, bytes, int], float | None]  # (the file, its beginning, its size) → seconds

# MPEG audio: (version, layer) → kbit/s by index; samples per frame; Hz by index, for MPEG 1.
_KBITS = {
    (1, 1): (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_HZ = (44_100, 48_000, 32_000)


def audio_length_s(read: ReadAt, size: int) -> tuple[float, bool]:
    """Seconds, and whether they come from the container; else they are estimated from the size."""
    head = read(0, HEAD_BYTES)
    measure = _measure_of(head)
    try:
        told = measure(read, head, size) if measure is not None else None
    except (struct.error, LookupError, ArithmeticError):
        told = None
    if told is None or not 0 < told < 1e7:
        return size / GUESSED_BYTES_PER_S, False
    return max(told, size / MOST_BYTES_PER_S), True


def _measure_of(head: bytes) -> Measure | None:
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return _wav
    if head[:4] == b"fLaC":
        return _flac
    if head[:4] == b"OggS":
        return _ogg
    if head[4:8] == b"ftyp":
        return _mp4
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return _webm
    if head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] >= b"\xe0"):
        return _mp3
    return None


def _wav(read: ReadAt, head: bytes, size: int) -> float | None:
    """Takes the rest of the file as sound and ignores the chunk's size, which is often wrong in streams."""
    at, rate = 12, 0
    while at + 8 <= len(head):
        name, length = struct.unpack_from("<4sI", head, at)
        if name == b"fmt ":
            rate = struct.unpack_from("<I", head, at + 16)[0]
        elif name == b"data":
            return (size - at - 8) / rate
        at += 8 + length + length % 2
    return None


def _flac(read: ReadAt, head: bytes, size: int) -> float | None:
    packed = int.from_bytes(head[18:26], "big")  # 20 bits of Hz, 3 of channels, 5 of width, 36 of samples
    hz, samples = packed >> 44, packed & ((1 << 36) - 1)
    return samples / hz if samples else None


def _mp3(read: ReadAt, head: bytes, size: int) -> float | None:
    at = 0
    if head[:3] == b"ID3":
        at = 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9])
        head, size = read(at, HEAD_BYTES), size - at
    found = re.search(rb"\xff[\xe0-\xff]", head)
    if found is None:
        return None
    frame = head[found.start() :]
    version = {0: 2.5, 2: 2, 3: 1}[frame[1] >> 3 & 3]
    layer = 4 - (frame[1] >> 1 & 3)
    if layer == 4:
        return None  # AAC without a container
    hz = _HZ[frame[2] >> 2 & 3] / (1 if version == 1 else 2 if version == 2 else 4)
    kbits = _KBITS[(1 if version == 1 else 2, layer if version == 1 else min(layer, 2))][frame[2] >> 4]
    samples = 384 if layer == 1 else 576 if layer == 3 and version != 1 else 1152
    tag = re.search(rb"Xing|Info", frame[:200])
    if tag is not None and frame[tag.end() + 3] & 1:  # variable bit rate: the number of frames
        return int.from_bytes(frame[tag.end() + 4 : tag.end() + 8], "big") * samples / hz
    return size / (kbits * 125)


def _ogg(read: ReadAt, head: bytes, size: int) -> float | None:
    """The last page holds the number of samples."""
    if b"OpusHead" in head[:512]:
        hz = 48_000
    elif (at := head.find(b"\x01vorbis", 0, 512)) >= 0:
        hz = struct.unpack_from("<I", head, at + 12)[0]
    else:
        return None
    tail = read(max(size - HEAD_BYTES, 0), HEAD_BYTES)
    last = tail.rfind(b"OggS")
    return struct.unpack_from("<q", tail, last + 6)[0] / hz if last >= 0 else None


def _mp4(read: ReadAt, head: bytes, size: int) -> float | None:
    at = 0
    for _ in range(MOST_ATOMS):
        start = read(at, 16)
        length, name = struct.unpack_from(">I4s", start)
        if length == 1:
            length = struct.unpack_from(">Q", start, 8)[0]
        if name == b"moov":
            return _movie_header(read(at, HEAD_BYTES))
        if length < 8 or at + length >= size:
            return None
        at += length
    return None


def _movie_header(moov: bytes) -> float | None:
    at = moov.find(b"mvhd")
    if at < 0:
        return None
    if moov[at + 4] == 1:  # version 1: 64-bit times
        scale, length = struct.unpack_from(">IQ", moov, at + 24)
    else:
        scale, length = struct.unpack_from(">II", moov, at + 16)
    return float(length / scale) if length else None


def _webm(read: ReadAt, head: bytes, size: int) -> float | None:
    """Duration is in units of TimestampScale nanoseconds. Browser recordings have none."""
    scale = 1_000_000
    if (at := head.find(b"\x2a\xd7\xb1")) >= 0:
        scale = int.from_bytes(head[at + 4 : at + 4 + (head[at + 3] & 0x0F)], "big")
    found = re.search(rb"\x44\x89([\x84\x88])", head)
    if found is None:
        return None
    form = ">f" if found[1] == b"\x84" else ">d"
    return float(struct.unpack_from(form, head, found.end())[0] * scale / 1e9)
