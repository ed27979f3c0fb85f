"""The tests that `make test-quick` omits besides the lists in other_compilers.py, and why. Each takes many times the
CPU time of an ordinary test."""

# Whole files.
FILES = {
    "test_activate_compiled": "compiles by inductor",
    "test_amx_hardware": "compiles the AMX kernels with sanitizers",
    "test_amx_model": "compiles the AMX kernels for their emulation",
    "test_benchmarks": "starts a process for each benchmark",
    "test_build": "starts builds",
    "test_cuda_attention_chunk": "as test_cuda_host",
    "test_cuda_cache": "as test_cuda_host",
    "test_cuda_capture": "as test_cuda_host",
    "test_cuda_derivatives": "as test_cuda_host",
    "test_cuda_dropout_parts": "as test_cuda_host",
    "test_cuda_flex": "as test_cuda_host",
    "test_cuda_float8": "as test_cuda_host",
    "test_cuda_host": "runs CUDA kernels on the host, one fiber for each thread",
    "test_cuda_indexed": "as test_cuda_host",
    "test_cuda_indexer": "as test_cuda_host",
    "test_cuda_key_mask": "as test_cuda_host",
    "test_cuda_kvcache": "as test_cuda_host",
    "test_cuda_large_scores": "as test_cuda_host",
    "test_cuda_mutations": "compiles a kernel for each barrier that is taken out",
    "test_cuda_selection": "builds the CUDA kernels for the host",
    "test_cuda_sm75": "as test_cuda_host",
    "test_cuda_sm80_backward": "as test_cuda_host",
    "test_cuda_sm80_backward_head_dims": "as test_cuda_host",
    "test_cuda_sm80_decode": "as test_cuda_host",
    "test_cuda_sm80_flex": "as test_cuda_host",
    "test_cuda_sm80_head_dims": "as test_cuda_host",
    "test_cuda_sm80_jvp": "as test_cuda_host",
    "test_cuda_sm80_varlen": "as test_cuda_host",
    "test_cuda_sm90": "as test_cuda_host",
    "test_cuda_sm90_backward": "as test_cuda_host",
    "test_cuda_sm90_balance": "builds the CUDA kernels for the host",
    "test_cuda_sm90_few_rows": "as test_cuda_host",
    "test_cuda_sm90_flex": "as test_cuda_host",
    "test_cuda_sm90_float8": "as test_cuda_host",
    "test_cuda_sm90_head_dims": "as test_cuda_host",
    "test_cuda_sm90_mutations": "as test_cuda_mutations",
    "test_cuda_sm90_options": "as test_cuda_host",
    "test_cuda_sm90_pairs": "as test_cuda_mutations",
    "test_cuda_sm90_sorted_rounds": "as test_cuda_host",
    "test_cuda_sm90_switches": "as test_cuda_mutations",
    "test_cuda_sm90_varlen": "as test_cuda_host",
    "test_cuda_varlen": "as test_cuda_host",
    "test_cuda_weights": "as test_cuda_host",
    "test_demo": "trains models",
    "test_deterministic": "as test_cuda_host",
    "test_distributed_compile": "compiles in several processes",
    "test_distributed_costs": "starts processes",
    "test_distributed_dtensor": "starts processes",
    "test_distributed_errors": "starts processes",
    "test_distributed_example": "trains a model in three processes",
    "test_distributed_models": "trains models in several processes",
    "test_distributed_sdpa": "starts processes",
    "test_documentation": "runs every example of the documentation",
    "test_flex_tests_of_torch": "starts pytest",
    "test_gpu_command": "starts processes that time out",
    "test_gpu_worker": "starts processes",
    "test_header_files": "compiles every header by itself",
    "test_io_counts": "counts every access of the algorithms",
    "test_iomodel": "counts the accesses of large problems, and runs its commands",
    "test_long_example": "trains models, two processes in one of them",
    "test_meanflow": "trains a model",
    "test_meanflow_digits": "trains a model",
    "test_object_files": "compiles the kernels of every instruction set",
    "test_paper_tables": "a process with torch for each measurement",
    "test_sanitizers": "compiles the kernels with sanitizers",
    "test_scaling": "compiles kernels that record their tasks",
    "test_short_examples": "trains models",
    "test_sparse_indexer_example": "trains a model",
    "test_transformers": "models of transformers",
    "test_transformers_packed": "models of transformers",
    "test_tutorial": "runs every command of the tutorial",
}
# Single tests of other files.
TESTS = {
    ("test_attention_weights", "test_opcheck"): "traces the operators",
    ("test_derivatives", "test_peak_memory_is_linear"): "a process with torch for each size",
    ("test_contract", "test_peak_memory_grows_linearly"): "a process with torch for each case",
    ("test_integration", "test_compile_2d_3d_gqa_and_broadcast"): "compiles several graphs",
    ("test_hub_kernel", "test_the_kernel_imports_its_own_library"): "starts processes",
    ("test_integration", "test_compile_fullgraph"): "compiles by inductor",
    ("test_integration", "test_compile_with_dropout_is_governed_by_the_seed"): "compiles by inductor",
    ("test_integration", "test_integers_do_not_compile_anew"): "compiles several graphs",
    ("test_integration", "test_opcheck_attention"): "traces the operators",
    ("test_integration", "test_opcheck_attention_backward"): "traces the operators",
    ("test_import", "test_the_import_loads_no_slow_module"): "starts processes",
    ("test_import", "test_the_model_runs_in_a_clone_that_was_not_built"): "starts processes",
    ("test_import", "test_the_rest_says_that_the_source_folder_hides_the_package"): "starts processes",
    ("test_kernel_selection", "test_empty_environment_variable_is_as_none"): "starts processes",
    ("test_kernel_selection", "test_environment_forces_at_import"): "starts processes",
    ("test_kernel_selection", "test_unknown_name_in_the_environment_raises_at_import"): "starts processes",
    ("test_modules_in_models", "test_compile"): "compiles a model",
    ("test_reference_algorithms", "test_any_sizes_and_blocks"): "some hundred drawn sizes",
    ("test_transformers_keywords", "test_each_keyword_of_the_models_is_in_one_list"): "parses 350 models' sources",
    ("test_vllm_mapping", "test_importing_us_does_not_import_vllm"): "starts processes",
}

# The files of most time, about the longest first: so no worker is left alone with one at the end. The first five are of
# other commands.
FIRST = ["test_cuda_compile", "test_ptx_forms", "test_arm", "test_cuda_mutations", "test_cuda_sm90_mutations"]
FIRST += ["test_cuda_host", "test_sanitizers", "test_demo", "test_cuda_varlen", "test_integration"]
FIRST += ["test_cuda_sm90_varlen", "test_cuda_sm90_flex", "test_distributed_example", "test_distributed_compile"]
FIRST += ["test_cuda_sm80_flex", "test_cuda_sm80_backward", "test_long_example", "test_cuda_sm90_switches"]
FIRST += ["test_benchmarks", "test_flex_of_torch", "test_scaling", "test_cuda_sm90_few_rows", "test_cuda_sm80_varlen"]
FIRST += ["test_cuda_sm90_backward", "test_distributed_costs", "test_paper_tables", "test_gpu_command"]
# The files that read the machine code that test_cuda_compile makes. They come when it has ended: beside it they would
# wait for it.
AFTER_FIRST = ["test_gpu_time_model", "test_cuda_sm90_code", "test_cuda_sm80_code"]


def order_of(file: str) -> int:
    order = [*FIRST, *AFTER_FIRST]
    return order.index(file) if file in order else len(order)


def is_slow(file: str, function: str) -> bool:
    return file in FILES or (file, function) in TESTS
