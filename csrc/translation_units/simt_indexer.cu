// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/simt/indexer_bfloat16.cu"
#include "../cuda/simt/indexer_float16.cu"
#include "../cuda/simt/indexer_float32.cu"
#include "../cuda/simt/indexer_float64.cu"
