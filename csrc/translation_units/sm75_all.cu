// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/sm75/backward_float16.cu"
#include "../cuda/sm75/decode_float16.cu"
#include "../cuda/sm75/forward_float16.cu"
