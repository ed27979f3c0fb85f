"""The wheels of a release. The tag workflow and [tool.cibuildwheel] repeat these lists, and a test compares them."""

TORCHES = ["2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
# torch has no wheel for these: 2.15 dropped Python 3.10.
ABSENT = [("2.15.0", "3.10")]
PAIRS = [(torch, python) for torch in TORCHES for python in PYTHONS if (torch, python) not in ABSENT]
# The wheels of `make release` without options: the pair of the Makefile. On Linux each torch of PyPI needs several GB
# of CUDA packages. So the tag workflow builds the other pairs, with PyTorch's index of CPU builds.
HERE = [("2.13.0", "3.11")]
