// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/combine.cu"
#include "../cuda/dropout_mask.cu"
#include "../cuda/select.cu"
#include "../cuda/simt/key_lists.cu"
