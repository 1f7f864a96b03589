/* A library that torch_npu names as a dependency and of which it uses no symbol here. */
__attribute__((visibility("default"))) int ascend_emulator_empty_library = 1;
