"""The operations in C for CPUs: `native/` holds the sources, `build` compiles them, `library` loads the result, and
`table` is the implementation of `kernels.ops.Kernels` on top of it."""
