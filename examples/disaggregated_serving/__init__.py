"""A real language model served the disaggregated way: two prefill stages, one decode process, KV moved between them.

An example of how the packages fit together, not a serving engine: it knows one model family and greedy sampling only.
"""
