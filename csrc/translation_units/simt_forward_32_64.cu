// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/forward_float32.cu"
#include "../cuda/simt/forward_float64.cu"
