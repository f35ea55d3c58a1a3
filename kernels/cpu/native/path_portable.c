/* Plain C for any machine: vectors of 8 in the compiler's vector language, fused multiply-adds through fmaf. The bits of
 * the AVX2 path. Run natively on x86-64. */
#define LANES 8
#define NARROW_ROWS 4
#define WIDE_ROWS 2
#define EXPANDED_NARROW_ROWS 4
#define EXPANDED_WIDE_ROWS 2
#define KEEPING_TILE 2
#define TURN 1
#define PATH_NAME portable
#include "path_fma.h"

static bool portable_available(void) { return true; }
