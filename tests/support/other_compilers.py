"""The tests that need a compiler that the build does not need: nvcc or the CUDA toolkit's headers, clang, or a compiler
for 64-bit ARM. They read machine code, run it in an emulator, or look at the compiler's messages.

`make test` omits them, `make test-compilers` runs them, `.ci/run` runs both. They can fail only after a change of
kernels, of the operators' CUDA half, of tests/cuda_host, tests/ptx, tests/gpu_units or tests/cpp.
"""

FILES = {
    "test_arm": "cross-compiles the kernels and runs them in an emulator",
    "test_compilers": "compiles the kernels with clang",
    "test_cuda_binding": "compiles the binding's CUDA half",
    "test_cuda_compile": "compiles every CUDA kernel",
    "test_cuda_layouts": "compiles CuTe",
    "test_cuda_sm80_code": "compiles kernels and reads their machine code",
    "test_cuda_sm90_code": "compiles the sm90 kernels and reads their machine code",
    "test_cuda_sm90_float8_code": "as test_cuda_sm90_code",
    "test_gpu_time_model": "as test_cuda_sm90_code",
    "test_ptx_flex": "as test_ptx_sm80",
    "test_ptx_forms": "as test_ptx_sm80",
    "test_ptx_instructions": "as test_ptx_sm80",
    "test_ptx_sm75": "as test_ptx_sm80",
    "test_ptx_sm80": "compiles kernels by nvcc and g++, and runs them on the host",
    "test_ptx_pairs": "as test_ptx_sm80",
    "test_ptx_sm90": "as test_ptx_sm80",
    "test_ptx_sm90_float8": "as test_ptx_sm80",
}
# Single tests of other files.
TESTS = {
    ("test_gpu_command", "test_the_switches_compile"): "compiles a kernel with a switch changed",
    ("test_gpu_command", "test_the_units_compile_and_name_what_they_need"): "compiles the units for a GPU",
}


def needs_one(file: str, function: str) -> bool:
    return file in FILES or (file, function) in TESTS
