/* Which paths were built, and which of them this machine can run. */
#include <string.h>

#include "path.h"

/* From the build's flags: paths whose flags the compiler knew. */
static const struct pdk_path *const built[] = {
#ifdef PDK_WITH_AMX
    &amx_path,
#endif
#ifdef PDK_WITH_AVX512
    &avx512_path,
#endif
#ifdef PDK_WITH_AVX2
    &avx2_path,
#endif
    &portable_path,
};

static const struct pdk_path *find(const char *name)
{
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        if (strcmp(built[i]->name, name) == 0)
            return built[i];
    return NULL;
}

int pdk_path_is_built(const char *name) { return find(name) != NULL; }

const struct pdk_path *pdk_path(const char *name)
{
    const struct pdk_path *path = find(name);
    return path && path->available() ? path : NULL;
}

const char *pdk_build(void) { return __VERSION__; }
