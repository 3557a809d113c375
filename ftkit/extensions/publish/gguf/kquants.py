"""K-quants: matrices in 4, 5 or 6 bits, packed as ggml packs them, byte for byte.

The package gguf unpacks these formats and packs none. The formats are those of `block_q4_K`,
`block_q5_K` and `block_q6_K` in ggml-common.h; what is searched, in which order and in which
arithmetic is that of ggml-quants.c, as in llama.cpp of July 2026 (llama-cpp-python 0.3.36),
compiled for processors without fused multiplication and addition. All numbers are float32, as in C,
and sums are taken in the order of the numbers, because other orders round differently.

Blocks of 256 numbers lie side by side in the last dimension, so that each operation is one of numpy
over all blocks.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

BLOCK_NUMBERS = 256
_GROUPS = 16
"""Groups of numbers in a block of Q6_K; the other formats have half as many."""
_TASK_BLOCKS = 256
"""Blocks that are packed together: their numbers fit in the cache of a core."""
_LEAST = np.float32(1e-15)
"""GROUP_MAX_EPS: smaller numbers count as zero."""
_ROUNDING = np.float32(12582912.0)
"""1.5 * 2^23: added to a number, it leaves the nearest whole one in the lowest bits."""
_SCALE_STEPS = 63
"""Largest scale of a group in the six bits that it has."""
_F32 = np.float32
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
"""Formats that `pack` knows."""


@dataclass(frozen=True)
class _Search:
    """The scales that are tried for a group: those for (first + step * i + most) levels."""

    first: float
    step: float
    count: int


_PLAIN = {15: _Search(-1.0, 0.1, 21), 31: _Search(-0.5, 0.1, 16)}
"""Without importance, by the largest level."""
_WEIGHED = _Search(-0.9, 0.05, 37)


def pack(rows: np.ndarray, kind: str, importance: np.ndarray | None = None) -> Iterator[bytes]:
    """Pack a matrix, some rows at a time.

    Args:
        rows: [rows, numbers of a row], float32; numbers of a row are a multiple of 256.
        kind: Q4_K, Q5_K or Q6_K.
        importance: of each number of a row, as llama-imatrix measures it; None: ggml's own rule.

    Yields:
        Blocks in the order of the rows.
    """
    packer = _PACKERS[kind]
    blocks = rows.reshape(-1, BLOCK_NUMBERS)
    row_blocks = rows.shape[1] // BLOCK_NUMBERS
    of_blocks = None if importance is None else importance.reshape(row_blocks, BLOCK_NUMBERS)

    def packed(start: int) -> bytes:
        part = np.ascontiguousarray(blocks[start : start + _TASK_BLOCKS].T)
        weights = None
        if of_blocks is not None:
            numbers = np.arange(start, start + part.shape[1]) % row_blocks
            weights = np.ascontiguousarray(of_blocks[numbers].T)
        # As C: what is divided by zero there is compared with something, and not taken.
        with np.errstate(all="ignore"):
            return packer(part, weights).tobytes()

    # Threads: numpy lets others run while it computes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(packed, range(0, len(blocks), _TASK_BLOCKS))


def _nearest(values: np.ndarray) -> np.ndarray:
    """Round as ggml does, which has no sense beyond 2^22 and is the same there."""
    bits = (values + _ROUNDING).view(np.int32)
    found: np.ndarray = (bits & 0x007FFFFF) - 0x00400000
    return found


def _rounded(values: np.ndarray, least: int, most: int) -> np.ndarray:
    """Round to whole numbers of a range, in place; all are far from 2^22."""
    np.rint(values, out=values)
    np.maximum(values, _F32(least), out=values)
    return np.minimum(values, _F32(most), out=values)


def _sum(values: np.ndarray) -> np.ndarray:
    """Add along the first dimension, one after the other."""
    total = values[0].copy()
    for row in values[1:]:
        total += row
    return total


def _with_minimum(x: np.ndarray, weights: np.ndarray | None, most: int) -> tuple[np.ndarray, ...]:
    """Pack blocks of eight groups, each of which has a scale and a minimum (Q4_K, Q5_K).

    Args:
        x: [256, blocks].
        weights: the same for importance, or None.
        most: the largest level: 15 or 31.

    Returns:
        levels [256, blocks], the header of each block [blocks, 16].
    """
    count = x.shape[1]
    groups = x.reshape(8, 32, count).swapaxes(0, 1).reshape(32, -1)  # [32, 8 x blocks]
    if weights is None:
        size = np.sqrt(_sum(groups * groups) / _F32(32))
        importance, search = size + np.abs(groups), _PLAIN[most]
    else:
        size = _F32(2) * _sum(x * x) / _F32(BLOCK_NUMBERS)
        of_groups = weights.reshape(8, 32, count).swapaxes(0, 1).reshape(32, -1)
        # The same mean for the groups of a block.
        importance = of_groups * np.sqrt(np.tile(size, 8) + groups * groups)
        search = _WEIGHED
    levels, scales, minima = _scales_and_minima(groups, importance, most, search)
    scales, minima = scales.reshape(8, count), minima.reshape(8, count)
    if weights is None:
        scale_codes, block_scale = _six_bits(scales)
        minimum_codes, block_minimum = _six_bits(minima)
    else:
        of_groups = _sum(importance).reshape(8, count)
        scale_codes, block_scale = _six_bits_weighed(scales, of_groups)
        minimum_codes, block_minimum = _six_bits_weighed(minima, of_groups)
    halves = np.stack([block_scale, block_minimum]).astype(np.float16)
    # Levels are chosen anew for the scales as they are stored.
    scale = (halves[0].astype(_F32) * scale_codes.astype(_F32)).reshape(-1)
    minimum = (halves[1].astype(_F32) * minimum_codes.astype(_F32)).reshape(-1)
    # A scale that became zero keeps the levels of the search.
    chosen = np.where(scale == 0, levels, _rounded((groups + minimum) / scale, 0, most))
    chosen = chosen.astype(np.uint8)
    header = np.concatenate(
        [
            np.ascontiguousarray(halves.T).view(np.uint8),
            _six_bit_fields(scale_codes, minimum_codes).T,
        ],
        axis=1,
    )
    return chosen.reshape(32, 8, count).swapaxes(0, 1).reshape(BLOCK_NUMBERS, count), header


def _scales_and_minima(
    x: np.ndarray, weights: np.ndarray, most: int, search: _Search
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Search the scale and the minimum of each group (make_qkx2_quants, make_qkx3_quants).

    Args:
        x: [32, groups].
        weights: the same.
        most: the largest level.
        search: what is tried.

    Returns:
        levels [32, groups], scales, and minima with the sign turned.
    """
    minimum = np.minimum(x.min(axis=0), _F32(0))
    maximum = x.max(axis=0)
    is_flat = maximum <= minimum
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    inverse = _F32(most) / (maximum - minimum)
    scale = _F32(1) / inverse

    def levels_by(inverse: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        found = x - minimum
        found *= inverse
        return _rounded(found, 0, most)

    def error_of(levels: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        difference = scale * levels
        difference += minimum
        difference -= x
        difference *= difference
        difference *= weights
        return _sum(difference)

    # What the levels follow from is kept, rather than the levels.
    kept_inverse, kept_minimum = inverse, minimum
    least = error_of(levels_by(inverse, minimum), scale, minimum)
    for number in range(search.count):
        tried = _F32(search.first) + _F32(search.step) * _F32(number) + _F32(most)
        inverse = tried / (maximum - minimum)
        levels = levels_by(inverse, minimum)
        product = weights * levels
        sum_l = _sum(product)
        sum_l2 = _sum(product * levels)
        product *= x
        sum_xl = _sum(product)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        # A minimum above zero cannot be stored: it is zero, with the best scale for that.
        is_above = new_minimum > 0
        new_minimum = np.where(is_above, _F32(0), new_minimum)
        new_scale = np.where(is_above, sum_xl / sum_l2, new_scale)
        error = error_of(levels, new_scale, new_minimum)
        is_better = (determinant > 0) & (error < least)
        kept_inverse = np.where(is_better, inverse, kept_inverse)
        kept_minimum = np.where(is_better, minimum, kept_minimum)
        least = np.where(is_better, error, least)
        scale = np.where(is_better, new_scale, scale)
        minimum = np.where(is_better, new_minimum, minimum)
    levels = np.where(is_flat, _F32(0), levels_by(kept_inverse, kept_minimum))
    return levels, np.where(is_flat, _F32(0), scale), -minimum


def _six_bits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of [8, blocks] in six bits, and what one stands for: the largest is 63."""
    # A zero more: the largest of -0 and 0 may be -0, whose bits differ.
    largest = np.maximum(values.max(axis=0), _F32(0)) + _F32(0)
    inverse = np.where(largest > 0, _F32(_SCALE_STEPS) / largest, _F32(0))
    codes = _nearest(inverse * values).astype(np.uint8)
    return np.minimum(codes, _SCALE_STEPS), largest / _F32(_SCALE_STEPS)


def _six_bits_weighed(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same with the least weighed error (make_qp_quants)."""
    most = _SCALE_STEPS
    largest = np.maximum(values.max(axis=0), _F32(0))
    is_zero = largest < _LEAST
    inverse = _F32(most) / largest
    best = inverse
    codes = _nearest(inverse * values).astype(np.uint8).astype(_F32)

    def error_of(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
        difference = values - scale * codes
        return _sum(weights * difference * difference)

    least = error_of(_F32(1) / inverse, codes)
    for number in (-4, -3, -2, -1, 1, 2, 3, 4):
        tried = (_F32(0.1) * _F32(number) + _F32(most)) / largest
        levels = np.minimum(_nearest(tried * values), most).astype(_F32)
        error = error_of(_F32(1) / tried, levels)
        is_better = error < least
        least = np.where(is_better, error, least)
        best = np.where(is_better, tried, best)
    levels = np.minimum(_nearest(best * values), most)
    codes = levels.astype(np.uint8).astype(_F32)
    levels = levels.astype(_F32)
    sum_lx, sum_l2 = _sum(weights * values * levels), _sum(weights * levels * levels)
    # One code after the other, as often as ggml does; blocks without a change stay as they are.
    for _ in range(5):
        changed = False
        for value, weight, code in zip(values, weights, codes, strict=True):
            without_lx = sum_lx - weight * value * code
            without_l2 = sum_l2 - weight * code * code
            level = np.minimum(_nearest(value * without_l2 / without_lx), most).astype(_F32)
            with_lx = without_lx + weight * value * level
            with_l2 = without_l2 + weight * level * level
            is_better = (without_lx > 0) & (without_l2 > 0) & (level != code)
            is_better &= with_lx * with_lx * sum_l2 > sum_lx * sum_lx * with_l2
            changed |= bool(is_better.any())
            code[is_better] = level[is_better].astype(np.int32).astype(np.uint8)
            sum_lx = np.where(is_better, with_lx, sum_lx)
            sum_l2 = np.where(is_better, with_l2, sum_l2)
        if not changed:
            break
    scale = np.where(sum_l2 > 0, sum_lx / sum_l2, _F32(0))
    zero = np.zeros_like(codes)
    return np.where(is_zero, zero, codes).astype(np.uint8), np.where(is_zero, _F32(0), scale)


def _six_bit_fields(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of six bits in twelve bytes: [12, blocks]."""
    low = np.concatenate([scales[:4] | (scales[4:] >> 4 << 6), minima[:4] | (minima[4:] >> 4 << 6)])
    return np.concatenate([low, (scales[4:] & 15) | ((minima[4:] & 15) << 4)])


def _q4_k(x: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    levels, header = _with_minimum(x, weights, 15)
    return np.concatenate([header, _low_nibbles(levels).T], axis=1)


def _q5_k(x: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    levels, header = _with_minimum(x, weights, 31)
    # The fifth bits of a group are one bit of 32 bytes.
    bits = (levels.reshape(8, 32, -1) >> 4) << np.arange(8, dtype=np.uint8)[:, None, None]
    high = np.bitwise_or.reduce(bits, axis=0)
    return np.concatenate([header, high.T, _low_nibbles(levels & 15).T], axis=1)


def _low_nibbles(levels: np.ndarray) -> np.ndarray:
    """Levels of four bits, [256, blocks], those of two groups in 32 bytes: [128, blocks]."""
    pairs = levels.reshape(4, 2, 32, -1)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).reshape(BLOCK_NUMBERS // 2, -1)


def _q6_k(x: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    count = x.shape[1]
    groups = _in_sixteens(x)
    importance = groups * groups if weights is None else _in_sixteens(weights)
    levels, scales = _scales(groups, importance)
    scales = scales.reshape(_GROUPS, count)
    # The first of the largest ones, with its sign.
    place = np.abs(scales).argmax(axis=0)
    largest = np.take_along_axis(scales, place[None], axis=0)[0]
    is_zero = np.abs(largest) < _LEAST
    inverse = _F32(-128) / largest
    half = (_F32(1) / inverse).astype(np.float16)
    codes = np.minimum(_nearest(inverse * scales), 127).astype(np.int8)
    scale = (half.astype(_F32) * codes.astype(_F32)).reshape(-1)
    # A scale that became zero keeps the levels of the search.
    chosen = np.where(scale == 0, levels, _rounded(groups / scale, -32, 31))
    chosen = (chosen + _F32(32)).astype(np.uint8)
    flat = chosen.reshape(16, _GROUPS, count).swapaxes(0, 1).reshape(2, 4, 32, count)
    nibbles = flat & 15
    low = np.stack([nibbles[:, 0] | (nibbles[:, 2] << 4), nibbles[:, 1] | (nibbles[:, 3] << 4)], 1)
    high = flat >> 4
    high = high[:, 0] | (high[:, 1] << 2) | (high[:, 2] << 4) | (high[:, 3] << 6)
    packed = np.concatenate(
        [
            low.reshape(128, count).T,
            high.reshape(64, count).T,
            codes.view(np.uint8).T,
            half[:, None].view(np.uint8),
        ],
        axis=1,
    )
    packed[is_zero] = 0
    return packed


def _in_sixteens(values: np.ndarray) -> np.ndarray:
    """[256, blocks] as [16, 16 x blocks]: the numbers of a group in the first dimension."""
    return values.reshape(_GROUPS, 16, -1).swapaxes(0, 1).reshape(16, -1)


def _scales(x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Search the scale of each group, for levels from -32 to 31 (make_qx_quants).

    Args:
        x: [16, groups].
        weights: the same.

    Returns:
        levels [16, groups], and scales.
    """
    place = np.abs(x).argmax(axis=0)
    largest = np.take_along_axis(x, place[None], axis=0)[0]
    is_zero = np.abs(largest) < _LEAST
    weighed = weights * x

    def levels_by(inverse: np.ndarray) -> np.ndarray:
        return _rounded(inverse * x, -32, 31)

    def sums_of(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _sum(weighed * levels), _sum(weights * levels * levels)

    kept = _F32(-32) / largest
    sum_lx, sum_l2 = sums_of(levels_by(kept))
    scale = np.where(sum_l2 != 0, sum_lx / sum_l2, _F32(0))
    best = scale * sum_lx
    for number in (*range(-9, 0), *range(1, 10)):
        inverse = -(_F32(32) + _F32(0.1) * _F32(number)) / largest
        sum_lx, sum_l2 = sums_of(levels_by(inverse))
        is_better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        new = sum_lx / sum_l2
        scale = np.where(is_better, new, scale)
        best = np.where(is_better, new * sum_lx, best)
        kept = np.where(is_better, inverse, kept)
    levels = np.where(is_zero, _F32(-32), levels_by(kept))
    return levels, np.where(is_zero, _F32(0), scale)


_PACKERS: Mapping[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
