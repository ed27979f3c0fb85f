// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/sm80/decode_bfloat16.cu"
#include "../cuda/sm80/decode_float16.cu"
