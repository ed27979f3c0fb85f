// Sources that are compiled together, because the headers of torch are half of their time. setup.py lists these files.
#include "../ops/autocast.cpp"
#include "../ops/cpu.cpp"
#include "../ops/cuda.cpp"
#include "../ops/meta.cpp"
#include "../ops/schema.cpp"
