// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/double_backward_bfloat16.cu"
#include "../cuda/simt/double_backward_float16.cu"
#include "../cuda/simt/double_backward_float32.cu"
#include "../cuda/simt/double_backward_float64.cu"
