"""The Python face of sgl_kernel_npu as far as the tests here call it; the library itself has no wheel for a CPU.

Its `npu::` operators are those of the emulator. It owns argument order and defaults of the wrappers, and nothing else;
what is not here is an absent package (see `engines_absent.py`).
"""
