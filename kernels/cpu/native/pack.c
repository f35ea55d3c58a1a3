/* Packing weights into panels (path.h), once at load. */
#include <string.h>

#include "compact.h"
#include "path.h"

enum {
    HIGHS = 128,        /* values of the seven bits that compact panels have codes for */
    CODES = 8,          /* of them, zero is the first */
    RARE = 256,         /* exceptions are at most one weight in so many, or panels are not compact */
};

int64_t pdk_packed_bytes(int64_t out_features, int64_t in_features, int64_t dtype)
{
    return rounded_up(out_features, PANEL) * bytes_of_panel(rounded_up(in_features, K_PAD), dtype) / PANEL;
}

static int64_t high_of(uint16_t weight) { return weight >> 8 & (HIGHS - 1); }

int64_t pdk_plan_compact(const struct pdk_path *path, const void *weight, int64_t out_features, int64_t in_features,
                         struct pdk_compact *compact)
{
    const uint16_t *weights = weight;
    const int64_t count = out_features * in_features;
    int64_t counts[HIGHS] = {0}, best = 0, first = 1;
    if (!path->products[PDK_COMPACT].product)
        return -1;
    for (int64_t i = 0; i < count; i++)
        counts[high_of(weights[i])]++;
    for (int64_t from = 1; from + CODES - 1 <= HIGHS; from++) {
        int64_t covered = 0;
        for (int64_t code = 1; code < CODES; code++)
            covered += counts[from + code - 1];
        if (covered > best) {
            best = covered;
            first = from;
        }
    }
    for (int64_t code = 0; code < CODES; code++) {
        compact->high_bytes[code] = (uint8_t)(code ? first + code - 1 : 0);
        compact->high_bytes[code + CODES] = compact->high_bytes[code] | 0x80;
    }
    const int64_t exceptions = count - counts[0] - best;
    return exceptions <= count / RARE ? exceptions : -1;
}

static void pack_compact(const uint16_t *weight, int64_t out_features, int64_t in_features,
                         const struct pdk_compact *compact, char *panels)
{
    const int64_t k_size = rounded_up(in_features, K_PAD), bytes = bytes_of_panel(k_size, PDK_COMPACT);
    const int64_t first = compact->high_bytes[1];
    int32_t found = 0;
    for (int64_t panel = 0; panel * PANEL < out_features; panel++, panels += bytes) {
        const int64_t outputs = min_of(PANEL, out_features - panel * PANEL);
        const uint16_t *rows = weight + panel * PANEL * in_features;
        memset(panels, 0, (size_t)bytes);
        compact->panel_exceptions[panel] = found;
        for (int64_t k = 0; k < in_features; k++) {
            char *unit = panels + k / COMPACT_K * COMPACT_UNIT;
            const int64_t line = k % COMPACT_K / 2;
            for (int64_t output = 0; output < outputs; output++) {
                const uint16_t value = rows[output * in_features + k];
                const int64_t place = compact_place(output, k % 2), high = high_of(value), code = high - first + 1;
                if (high && (code < 1 || code >= CODES)) {
                    const uint32_t wide = (uint32_t)value << 16;
                    struct pdk_exception *exception = &compact->exceptions[found++];
                    memcpy(&exception->weight, &wide, 4);
                    exception->place = (int32_t)(k * PANEL + output);
                    continue;
                }
                unit[line * COMPACT_PAIRS + place] = (char)value;
                unit[COMPACT_LINES * COMPACT_PAIRS + place] |=
                    (char)(((value >> 15) * CODES + (high ? code : 0)) << line * 4);
            }
        }
    }
    compact->panel_exceptions[rounded_up(out_features, PANEL) / PANEL] = found;
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
