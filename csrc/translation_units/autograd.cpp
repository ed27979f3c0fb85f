// Sources that are compiled together, because the headers of torch are half of their time. setup.py lists these files.
#include "../ops/autograd.cpp"
#include "../ops/flex/flex_autograd.cpp"
#include "../ops/varlen_autograd.cpp"
#include "../ops/weights_autograd.cpp"
