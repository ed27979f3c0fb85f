"""A pytest plugin that prints each failure immediately, because a stage whose time is over loses pytest's report."""


class Printer:
    def pytest_runtest_logreport(self, report):
        if report.failed:
            print(f"\nFAILED {report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # pytest-xdist sends the reports of its workers to the main process
        config.pluginmanager.register(Printer())
