// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/sm90/flex_backward_bfloat16.cu"
#include "../cuda/sm90/flex_backward_float16.cu"
