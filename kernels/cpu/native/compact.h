/* bfloat16 weights in 12 bits each, without a loss.
 *
 * A decode step of few rows waits for its weights, so their bytes are its time. The exponents of a matrix lie close
 * together: of a weight's upper byte (the sign and seven bits of exponent) nearly always only sixteen values occur. A
 * compact panel holds the lower byte as it is and four bits for the upper one. What they stand for is a table of the
 * linear: seven neighbouring values of the seven bits, and zero (which zeros and the tiniest numbers have), each with
 * both signs. The few weights in other places are exceptions: zero in the panel, and listed beside it. (An operand's
 * infinity times an exception is therefore no number.)
 *
 * Four values of K by PANEL outputs are a unit of three parts of 32 bytes. The first and the second pair of K are its two
 * lines:
 *
 *   lower bytes of the first line: k and k + 1
 *   lower bytes of the second line: k + 2 and k + 3
 *   codes of the upper bytes: the first line's in the lower half of each byte, the second one's in the upper
 *
 * A byte's place is that which AVX2's unpacking of bytes wants: for pair p (an output) and its value h (0 or 1 of K),
 * with b = p % 8 * 2 + h, it is b / 8 * 16 + p / 8 * 8 + b % 8.
 */
#ifndef PDK_COMPACT_H
#define PDK_COMPACT_H

#include "path.h"

enum {
    COMPACT_K = 4, /* of a unit */
    COMPACT_LINES = 2,
    COMPACT_PART = 32, /* bytes */
    COMPACT_UNIT = (COMPACT_LINES + 1) * COMPACT_PART,
};

static inline int64_t compact_place(int64_t output, int64_t odd)
{
    const int64_t half = output % 8 * 2 + odd;
    return half / 8 * 16 + output / 8 * 8 + half % 8;
}

#endif
