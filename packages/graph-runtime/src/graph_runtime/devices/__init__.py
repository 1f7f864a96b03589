"""The devices, each a leaf that is imported when it is first asked for.

This package imports none of them: see `graph_runtime.device.get_device`.
"""
