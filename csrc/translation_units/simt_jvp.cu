// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/jvp_bfloat16.cu"
#include "../cuda/simt/jvp_float16.cu"
#include "../cuda/simt/jvp_float32.cu"
#include "../cuda/simt/jvp_float64.cu"
