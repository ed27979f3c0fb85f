// Sources that are compiled together, because the headers of torch are half of their time. setup.py lists these files.
#include "../ops/autograd/autograd.cpp"
#include "../ops/autograd/varlen_autograd.cpp"
#include "../ops/autograd/weights_autograd.cpp"
#include "../ops/flex/flex_autograd.cpp"
#include "../ops/indexed/indexed_autograd.cpp"
