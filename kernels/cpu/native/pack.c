/* Packing weights into panels (path.h), once at load. */
#include <string.h>

#include "compact.h"
#include "path.h"

enum {
    HIGHS = 128,   /* values that the seven bits of an upper byte's exponent can have */
    CODES = 8,     /* as many of them have a code; the first stands for zero. With each sign: sixteen */
    NO_CODE = 255,
    RARE = 512,    /* Exceptions are at most one weight in so many, or panels are not compact: with one in 700 many
                    * rows take 1.15 times as long as with none, with one in 300 1.4 times. */
    COUNTERS = 4,  /* side by side: neighbours often have the same value, and one counter would wait for itself */
};

_Static_assert(sizeof(struct pdk_exception) == 8, "as in kernels/cpu/library.py");

int64_t pdk_packed_bytes(int64_t out_features, int64_t in_features, int64_t dtype)
{
    return rounded_up(out_features, PANEL) * bytes_of_panel(rounded_up(in_features, K_PAD), dtype) / PANEL;
}

int64_t pdk_plan_compact(const struct pdk_path *path, const void *weight, int64_t out_features, int64_t in_features,
                         struct pdk_compact *compact)
{
    const uint16_t *weights = weight;
    const int64_t count = out_features * in_features;
    int64_t counts[COUNTERS][HIGHS] = {0}, best = 0, first = 1;
    if (!path->products[PDK_COMPACT].product)
        return -1;
    for (int64_t i = 0; i < count; i++)
        counts[i % COUNTERS][weights[i] >> 8 & (HIGHS - 1)]++;
    for (int64_t high = 0; high < HIGHS; high++)
        for (int64_t i = 1; i < COUNTERS; i++)
            counts[0][high] += counts[i][high];
    for (int64_t from = 1; from + CODES - 1 <= HIGHS; from++) {
        int64_t covered = 0;
        for (int64_t code = 1; code < CODES; code++)
            covered += counts[0][from + code - 1];
        if (covered > best) {
            best = covered;
            first = from;
        }
    }
    for (int64_t code = 0; code < CODES; code++) {
        compact->high_bytes[code] = (uint8_t)(code ? first + code - 1 : 0);
        compact->high_bytes[code + CODES] = compact->high_bytes[code] | 0x80;
    }
    const int64_t exceptions = count - counts[0][0] - best;
    return exceptions <= count / RARE ? exceptions : -1;
}

struct packing {
    uint8_t codes[256]; /* by a weight's upper byte; NO_CODE */
    const struct pdk_compact *compact;
    int32_t found; /* exceptions so far */
};

static void keep_exception(struct packing *packing, uint16_t weight, int64_t place)
{
    struct pdk_exception *exception = &packing->compact->exceptions[packing->found++];
    const uint32_t wide = (uint32_t)weight << 16;
    memcpy(&exception->weight, &wide, 4);
    exception->place = (int32_t)place;
}

/* K_PAD values of K from `k` on, `known` of them there, of a panel's `outputs` rows. Row by row, as memory has them:
 * of each output exceptions are found in the order of K. */
static void pack_units(struct packing *packing, const uint16_t *rows, int64_t in_features, int64_t outputs, int64_t k,
                       int64_t known, char *units)
{
    memset(units, 0, K_PAD / COMPACT_K * COMPACT_UNIT);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t i = 0; i < known; i++) {
            const uint16_t weight = rows[output * in_features + k + i];
            const uint8_t code = packing->codes[weight >> 8];
            const int64_t line = i % COMPACT_K / 2;
            char *unit = units + i / COMPACT_K * COMPACT_UNIT + compact_place(output, i % 2);
            if (code == NO_CODE) {
                keep_exception(packing, weight, (k + i) * PANEL + output);
                continue;
            }
            unit[line * COMPACT_PART] = (char)weight;
            unit[COMPACT_LINES * COMPACT_PART] |= (char)(code << line * 4);
        }
}

static void pack_compact(const uint16_t *weight, int64_t out_features, int64_t in_features,
                         const struct pdk_compact *compact, char *panels)
{
    struct packing packing = {.compact = compact};
    memset(packing.codes, NO_CODE, sizeof packing.codes);
    for (int64_t code = 0; code < 2 * CODES; code++)
        packing.codes[compact->high_bytes[code]] = (uint8_t)code;
    for (int64_t panel = 0; panel * PANEL < out_features; panel++) {
        const int64_t outputs = min_of(PANEL, out_features - panel * PANEL);
        compact->panel_exceptions[panel] = packing.found;
        for (int64_t k = 0; k < in_features; k += K_PAD, panels += bytes_of_panel(K_PAD, PDK_COMPACT))
            pack_units(&packing, weight + panel * PANEL * in_features, in_features, outputs, k,
                       min_of(K_PAD, in_features - k), panels);
    }
    compact->panel_exceptions[rounded_up(out_features, PANEL) / PANEL] = packing.found;
}

void pdk_pack(const void *weight, int64_t out_features, int64_t in_features, int64_t dtype,
              const struct pdk_compact *compact, void *panels)
{
    const int64_t k_size = rounded_up(in_features, K_PAD), outputs = rounded_up(out_features, PANEL);
    if (dtype == PDK_COMPACT) {
        pack_compact(weight, out_features, in_features, compact, panels);
        return;
    }
    for (int64_t output = 0; output < outputs; output++) {
        const int64_t panel = output / PANEL * k_size * PANEL, lane = output % PANEL;
        const int64_t known = output < out_features ? in_features : 0;
        if (dtype == PDK_BFLOAT16) {
            const uint16_t *from = (const uint16_t *)weight + output * in_features;
            uint16_t *to = (uint16_t *)panels + panel + lane * 2;
            for (int64_t k = 0; k < k_size; k++)
                to[k / 2 * (2 * PANEL) + k % 2] = k < known ? from[k] : 0;
        } else {
            const float *from = (const float *)weight + output * in_features;
            float *to = (float *)panels + panel + lane;
            for (int64_t k = 0; k < k_size; k++)
                to[k * PANEL] = k < known ? from[k] : 0.0f;
        }
    }
}
