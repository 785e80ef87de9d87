"""TIFF files of one colour, made by hand: no library here writes separate planes."""

from __future__ import annotations

import struct

import numpy as np

HEIGHT, WIDTH = 40, 60
COLOUR = (200, 100, 30)


def tiff(bits: int, *, planar: bool, photometric: int = 2, samples: int = 3, extra: tuple[int, ...] = (),
         order: str = "<", big: bool = False) -> bytes:
    """A file of `COLOUR`. `big`: a BigTIFF."""
    kind = np.dtype(np.uint8 if bits == 8 else np.uint16).newbyteorder(order)
    scale = 1 if bits == 8 else 257
    pixels = np.zeros((HEIGHT, WIDTH, samples), kind)
    pixels[...] = [COLOUR[band % 3] * scale for band in range(samples)]
    data = (pixels.transpose(2, 0, 1) if planar else pixels).tobytes()
    strips = samples if planar else 1
    size = len(data) // strips
    header, place, number, entry_bytes, inline = (16, "Q", "Q", 20, 8) if big else (8, "I", "H", 12, 4)
    tags = [(256, 4, [WIDTH]), (257, 4, [HEIGHT]), (258, 3, [bits] * samples), (259, 3, [1]), (262, 3, [photometric]),
            (273, 4, [header + size * strip for strip in range(strips)]), (277, 3, [samples]), (278, 4, [HEIGHT]),
            (279, 4, [size] * strips), (284, 3, [2 if planar else 1])]
    if extra:
        tags.append((338, 3, list(extra)))
    begin = header + len(data)
    count = struct.pack(f"{order}{number}", len(tags))
    beyond = begin + len(count) + entry_bytes * len(tags) + inline
    entries, values = count, b""
    for tag, type_, numbers in tags:
        packed = struct.pack(f"{order}{len(numbers)}{'H' if type_ == 3 else 'I'}", *numbers)
        entries += struct.pack(f"{order}HH{place}", tag, type_, len(numbers))
        if len(packed) <= inline:
            entries += packed.ljust(inline, b"\0")
        else:
            entries += struct.pack(f"{order}{place}", beyond + len(values))
            values += packed
    mark = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}H", 43 if big else 42)
    if big:
        mark += struct.pack(f"{order}HH", 8, 0)  # bytes of a place
    return mark + struct.pack(f"{order}{place}", begin) + data + entries + b"\0" * inline + values
