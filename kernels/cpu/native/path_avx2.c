/* AVX2 and FMA: vectors of 8; bfloat16 panels are widened in registers. Run natively on Zen 3. */
#define LANES 8
#define NARROW_ROWS 6
#define WIDE_ROWS 3
#define EXPANDED_NARROW_ROWS 5
#define EXPANDED_WIDE_ROWS 2
#define KEEPING_TILE 4
#define TURN 4
#define PATH_NAME avx2
#include "path_fma.h"

static bool avx2_available(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}
