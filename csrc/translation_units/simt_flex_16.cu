// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/flex_bfloat16.cu"
#include "../cuda/simt/flex_float16.cu"
