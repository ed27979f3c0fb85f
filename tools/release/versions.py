"""Which wheels a release has. The tag workflow and [tool.cibuildwheel] repeat this list, and a test compares them."""

TORCHES = ["2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
