// Sources that are compiled together, because the headers of torch are half of their time. setup.py lists these files.
#include "../ops/keys/autocast.cpp"
#include "../ops/keys/cpu.cpp"
#include "../ops/keys/cuda.cpp"
#include "../ops/keys/meta.cpp"
#include "../ops/keys/schema.cpp"
