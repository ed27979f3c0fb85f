// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/forward_bfloat16.cu"
#include "../cuda/simt/forward_float16.cu"
