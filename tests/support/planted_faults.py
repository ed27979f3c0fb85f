"""The tests of the tests: each plants a fault and checks that the host run, a sanitizer or a comparison finds it.

`make test` omits them, `make test-faults` runs them, `.ci/run` runs both. They can fail only after a change of kernels,
of tests/cuda_host, tests/ptx or tests/cpp.
"""

FILES = {"test_cuda_mutations", "test_cuda_sm90_mutations"}
# The names of single tests in other files.
TESTS = {
    "test_a_planted_fault_is_found",
    "test_a_workspace_that_is_too_small_is_reported",
    "test_a_wrong_emulation_of_amx_is_reported",
    "test_other_errors_are_reported",
    "test_read_of_one_element_too_many_is_reported",
    "test_write_of_one_element_too_many_is_reported",
}


def plants_a_fault(file: str, function: str) -> bool:
    return file in FILES or function in TESTS
