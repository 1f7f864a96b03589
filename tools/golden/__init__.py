"""What is recorded of SGLang, one module a subject; `record_golden.py` beside this folder writes the files.

Each module's `record()` asks the engine's own functions and returns inputs with answers. It knows nothing of planners.
"""
