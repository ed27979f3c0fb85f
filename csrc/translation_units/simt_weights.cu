// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/weights_bfloat16.cu"
#include "../cuda/simt/weights_float16.cu"
#include "../cuda/simt/weights_float32.cu"
#include "../cuda/simt/weights_float64.cu"
