"""`python -m tools.conformance`: our routers against their public originals, weights, losses and gradients, as a table.

No original is in this repository. Classes are those of the installed transformers; code of other repositories is read
at run time, at a pinned commit, from GitHub or from copies of the repositories (`--originals`).
"""
