"""What `make test-quick` leaves out, and why. Each test here takes many times the CPU time of an ordinary one."""

# Whole files.
FILES = {
    "test_amx_model": "compiles the AMX kernels for their emulation",
    "test_arm": "cross-compiles the kernels and runs them in an emulator",
    "test_cuda_binding": "compiles the binding's CUDA half",
    "test_cuda_cache": "as test_cuda_host",
    "test_cuda_compile": "compiles every CUDA kernel",
    "test_cuda_derivatives": "as test_cuda_host",
    "test_cuda_host": "runs CUDA kernels on the host, one fiber for each thread",
    "test_cuda_key_mask": "as test_cuda_host",
    "test_cuda_kvcache": "as test_cuda_host",
    "test_cuda_large_scores": "as test_cuda_host",
    "test_cuda_layouts": "compiles CuTe",
    "test_cuda_mutations": "compiles a kernel for each barrier that is taken out",
    "test_cuda_selection": "builds the CUDA kernels for the host",
    "test_cuda_sm80_backward": "as test_cuda_host",
    "test_cuda_sm80_code": "compiles kernels and reads their machine code",
    "test_cuda_sm80_decode": "as test_cuda_host",
    "test_cuda_sm80_head_dims": "as test_cuda_host",
    "test_cuda_sm80_jvp": "as test_cuda_host",
    "test_cuda_sm80_varlen": "as test_cuda_host",
    "test_cuda_sm90": "as test_cuda_host",
    "test_cuda_sm90_backward": "as test_cuda_host",
    "test_cuda_sm90_code": "compiles the sm90 kernels and reads their machine code",
    "test_cuda_sm90_head_dims": "as test_cuda_host",
    "test_cuda_sm90_mutations": "as test_cuda_mutations",
    "test_cuda_sm90_options": "as test_cuda_host",
    "test_cuda_sm90_varlen": "as test_cuda_host",
    "test_cuda_varlen": "as test_cuda_host",
    "test_demo": "trains models",
    "test_distributed_example": "trains a model in three processes",
    "test_paper_tables": "a process with torch for each measurement",
    "test_sanitizers": "compiles the kernels with sanitizers",
}
# Single tests of other files.
TESTS = {
    ("test_contract", "test_peak_memory_grows_linearly"): "a process with torch for each size",
    ("test_integration", "test_compile_fullgraph"): "compiles by inductor",
    ("test_module_weights", "test_peak_memory_of_a_step_with_weights"): "weights of 16 heads at a length of 4096",
}


def is_slow(file: str, function: str) -> bool:
    return file in FILES or (file, function) in TESTS
