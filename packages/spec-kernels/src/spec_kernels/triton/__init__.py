"""Owns the Triton kernels; the one place that imports Triton, and only when a backend is loaded.

On a CPU they run in Triton's interpreter, which must have been asked for (TRITON_INTERPRET=1) before this is imported.
Grids and tiles come from `spec_kernels.tiling`; indices are widened to int64 before they are multiplied.
"""
