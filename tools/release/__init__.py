"""`make release`: all files of a release in one folder."""
