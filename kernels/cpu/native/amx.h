/* The tile instructions: permission, configuration, and the same in plain C for tests on machines without them. */
#ifndef PDK_AMX_H
#define PDK_AMX_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef PDK_EMULATED

struct emulated_tile {
    _Alignas(64) unsigned char rows[16][64];
};

static _Thread_local struct emulated_tile emulated_tiles[8];

static inline void tile_zero(int tile) { memset(&emulated_tiles[tile], 0, sizeof emulated_tiles[tile]); }

static inline void tile_loadd(int tile, const void *from, int64_t stride)
{
    for (int row = 0; row < 16; row++)
        memcpy(emulated_tiles[tile].rows[row], (const char *)from + row * stride, 64);
}

#define tile_stream_loadd tile_loadd

static inline void tile_stored(int tile, void *to, int64_t stride)
{
    for (int row = 0; row < 16; row++)
        memcpy((char *)to + row * stride, emulated_tiles[tile].rows[row], 64);
}

/* The instruction takes and gives what is below float32's normal range as zero. */
static inline float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value; }

static inline float emulated_half(uint32_t pair, int odd)
{
    const uint32_t bits = odd ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

static inline float emulated_fma(uint32_t a, uint32_t b, int odd, float sum)
{
    return flushed(fmaf(emulated_half(a, odd), emulated_half(b, odd), sum));
}

/* A chain of fused products over the even K and one over the odd, joined and then added: the bits of the instruction on
 * Sapphire Rapids. */
static inline void tile_dpbf16ps(int sums, int left, int right)
{
    for (int row = 0; row < 16; row++) {
        float even[16] = {0}, odd[16] = {0}, total[16];
        for (int k = 0; k < 16; k++) {
            uint32_t a, b[16];
            memcpy(&a, emulated_tiles[left].rows[row] + 4 * k, 4);
            memcpy(b, emulated_tiles[right].rows[k], 64);
            for (int column = 0; column < 16; column++) {
                even[column] = emulated_fma(a, b[column], 0, even[column]);
                odd[column] = emulated_fma(a, b[column], 1, odd[column]);
            }
        }
        memcpy(total, emulated_tiles[sums].rows[row], 64);
        for (int column = 0; column < 16; column++)
            total[column] = flushed(total[column] + flushed(even[column] + odd[column]));
        memcpy(emulated_tiles[sums].rows[row], total, 64);
    }
}

static bool amx_available(void) { return true; }
static void amx_begin(void) {}
static void amx_end(void) {}

#else

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define tile_zero(tile) _tile_zero(tile)
#define tile_loadd(tile, from, stride) _tile_loadd(tile, from, stride)
/* What passes once: it does not push out of the nearest cache what is wanted again. */
#define tile_stream_loadd(tile, from, stride) _tile_stream_loadd(tile, from, stride)
#define tile_stored(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dpbf16ps(sums, left, right) _tile_dpbf16ps(sums, left, right)

enum { ARCH_REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

/* The processor has it, and the system lets this process use it: permission is asked for once and lasts. */
static bool amx_available(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 22)) || !(d & (1u << 24)))
        return false;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           syscall(SYS_arch_prctl, ARCH_REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static void amx_begin(void)
{
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* GCC 12.2 may drop the stores before the instruction */
    _tile_loadconfig(&config);
}

static void amx_end(void) { _tile_release(); }

#endif

#endif
