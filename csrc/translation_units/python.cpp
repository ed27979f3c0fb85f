// Sources that are compiled together, because the headers of torch are half of their time. setup.py lists these files.
#include "../bindings.cpp"
#include "../ops/keys/eager.cpp"
