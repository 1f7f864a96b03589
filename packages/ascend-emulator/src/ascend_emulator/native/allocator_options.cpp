// Takes names out of torch's set of allocator options. It needs no header of torch; _allocator_options.py hands it the set.
#include <string>
#include <unordered_set>

extern "C" __attribute__((visibility("default"))) void emulator_forget_option(std::unordered_set<std::string>* options,
                                                                              const char* name) {
  options->erase(name);
}
