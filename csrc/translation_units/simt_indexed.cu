// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/indexed_bfloat16.cu"
#include "../cuda/simt/indexed_float16.cu"
#include "../cuda/simt/indexed_float32.cu"
#include "../cuda/simt/indexed_float64.cu"
