"""Everything that runs on a GPU. No GPU has run it yet: Triton's interpreter has, and its compiler (`docs/gpu.md`).

The rest of the library calls `experts.apply`; `choice` says whether our kernels or torch's own operators do the work.
`triton/` holds the kernels; it is imported only where they run, because the package `triton` is optional.
"""
