"""ascend-emulator alone, without torch_npu: it imports, and says what is missing and how to get it."""

import importlib.util
import sys

import ascend_emulator
from ascend_emulator import errors

assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("torch_npu") is None
assert not ascend_emulator.is_installed() and "torch" not in sys.modules
try:
    ascend_emulator.install(devices=2)
except errors.MissingPackageError as error:
    assert isinstance(error, ImportError) and "ascend-emulator[npu]" in str(error), error
    print("refused:", error)
else:
    sys.exit("install() went through without torch_npu")
assert not ascend_emulator.is_installed()
print("ascend-emulator: imports alone and names what it needs")
