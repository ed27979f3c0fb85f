// Compiled together, because each unit takes two CPU seconds for the headers. setup.py lists this file.
#include "../cuda/sm90/forward_float8.cu"
#include "../cuda/sm90/make_rounds.cu"
#include "../cuda/sm90/task_order.cu"
