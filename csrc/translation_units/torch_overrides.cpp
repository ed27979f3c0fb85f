// Sources that are compiled together, because the headers of torch are half of their time. setup.py lists these files.
#include "../torch_overrides/arguments.cpp"
#include "../torch_overrides/flash_attention.cpp"
#include "../torch_overrides/flash_for_cpu.cpp"
#include "../torch_overrides/native_mha.cpp"
#include "../torch_overrides/overrides.cpp"
#include "../torch_overrides/sdpa.cpp"
