"""The results of training runs: a table for the terminal and a JSON file."""

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from gpt_training import Settings, Step
from loss_agreement import FACTOR, Check, Curves
from rich import box
from rich.console import Console
from rich.table import Table
from stdlib_text import Corpus

MIB = 2**20


@dataclass
class Run:
    """One training run and its numbers."""

    attention: str
    name: str  # the name of the attention, numbered if it is repeated
    steps: list[Step] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    first_gradients: dict[str, float] = field(default_factory=dict)  # norm by parameter, in the first step
    peak_memory: int = 0
    memory_at_start: int = 0
    kernel: str | None = None
    sample: str = ""

    @property
    def curves(self) -> Curves:
        losses = [step.loss for step in self.steps]
        return Curves(losses, [loss for _, loss in self.validation], self.first_gradients)

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of each step, without the first steps, which warm up."""
        return [step.seconds for step in self.steps[min(3, len(self.steps) // 2) :]]

    def milliseconds(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the time per step."""
        times = [1000 * seconds for seconds in self.step_seconds]
        if len(times) < 2:
            return times[0], times[0], times[0]
        first, median, third = statistics.quantiles(times, n=4, method="inclusive")
        return first, median, third

    def status(self) -> str:
        """For the progress bar."""
        step = self.steps[-1]
        validation = f" (val {self.validation[-1][1]:.3f})" if self.validation else ""
        return f"{self.name} {step.loss:.3f}{validation} {1000 * step.seconds:.0f} ms"

    def as_json(self, settings: Settings) -> dict:
        first, median, third = self.milliseconds()
        return {
            "name": self.name,
            "attention": self.attention,
            "kernel": self.kernel,
            "loss": self.curves.loss,
            "grad_norm": [step.grad_norm for step in self.steps],
            "first_gradient_norms": self.first_gradients,
            "validation": [{"step": step, "loss": loss} for step, loss in self.validation],
            "step_seconds": [step.seconds for step in self.steps],
            "step_milliseconds": {"q1": first, "median": median, "q3": third},
            "tokens_per_second": 1000 * settings.batch_size * settings.context / median,
            "peak_memory_bytes": self.peak_memory,
            "memory_at_start_bytes": self.memory_at_start,
            "sample": self.sample,
        }


def machine(device: str) -> dict:
    """Describes the machine."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def cpu_model() -> str:
    """The processor's name from Linux, or on other systems from Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(runs: list[Run], baseline: Run, settings: Settings) -> Table:
    """Makes a table with one row for each run. Speed is relative to the baseline."""
    title = f"The same GPT and batches, another attention (speed: {baseline.name} is 1)"
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("attention", no_wrap=True)
    headings = [
        "train\nloss",
        "val\nloss",
        "ms/step\n(quartiles)",
        f"speed\n(to {baseline.name})",
        "tokens/s",
        "peak MiB\n(training)",
    ]
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        first, median, third = run.milliseconds()
        result.add_row(
            run.name,
            f"{run.steps[-1].loss:.4f}",
            f"{run.validation[-1][1]:.4f}",
            f"{median:.0f} ({first:.0f}-{third:.0f})",
            f"{speed(baseline, run):.2f}x",
            f"{1000 * settings.batch_size * settings.context / median:,.0f}",
            f"{run.peak_memory / MIB:.0f} ({(run.peak_memory - run.memory_at_start) / MIB:.0f})",
        )
    return result


def speed(baseline: Run, run: Run) -> float:
    """The median over the steps of baseline time / run time. Steps alternate, so a busy machine slows both."""
    pairs = zip(baseline.step_seconds, run.step_seconds, strict=True)
    return statistics.median([slow / fast for slow, fast in pairs])


def print_checks(console: Console, reference: Run, yardstick: Run, run: Run, checks: list[Check]) -> None:
    """Prints the distances of two runs from the reference, and the verdict."""
    console.print(f"Distance from {reference.name}, torch's plain softmax:")
    console.print(f"  {'':<30} {run.name:>15} {yardstick.name:>9} {'limit':>9}")
    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[red]TOO FAR[/]"
        numbers = f"{check.difference:15.1e} {check.yardstick:9.1e} {check.limit:9.1e}"
        console.print(f"  {check.name:<30} {numbers}  {mark}")
    console.print(f"  The limit is {FACTOR:g} times the distance of {yardstick.name}, torch's default kernel.")
    if all(check.passed for check in checks):
        console.print(f"[bold green]  The training runs of {run.name} and of torch's two kernels agree.[/]")
    else:
        console.print(f"[bold red]  The training runs of {run.name} and of torch's two kernels DO NOT agree.[/]")


def write_json(path: Path, runs: list[Run], comparisons: list[dict], settings: Settings, corpus: Corpus) -> None:
    """Writes every number of the table and of the plot."""
    results = {
        "agree": all(comparison["agree"] for comparison in comparisons),
        "settings": asdict(settings),
        "machine": machine(settings.device),
        "corpus": corpus.description(),
        "comparisons": comparisons,
        "runs": [run.as_json(settings) for run in runs],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def comparison_as_json(reference: Run, yardstick: Run, run: Run, checks: list[Check]) -> dict:
    return {
        "reference": reference.name,
        "yardstick": yardstick.name,
        "candidate": run.name,
        "agree": all(check.passed for check in checks),
        "speed": speed(yardstick, run),
        "factor": FACTOR,
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
    }
