"""CRC-32 of bytes that several threads sum in stretches: what the sums of two stretches make of the whole.

Let a checksum be a polynomial over GF(2). To append n bytes to a stretch is to multiply its checksum by x^(8 n), modulo
the polynomial of CRC-32, and to add that of the n bytes (as zlib's crc32_combine does, which Python does not have).
"""

from collections.abc import Iterable

POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x^0, as in the checksums
ONE, X = 1 << 31, 1 << 30


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of stretches that lie one after the other, from (checksum, bytes) of each."""
    whole = 0
    for crc, num_bytes in parts:
        whole = _times(_power_of_x(8 * num_bytes), whole) ^ crc if whole else crc
    return whole


def _times(first: int, second: int) -> int:
    product = 0
    while first:
        if first & ONE:
            product ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (POLYNOMIAL if second & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    found, square = ONE, X
    while exponent:
        if exponent & 1:
            found = _times(found, square)
        square, exponent = _times(square, square), exponent >> 1
    return found
