"""Runs all tests and measurements of a machine with an NVIDIA GPU: `make gpu`, or this file.

Runs the stages of stages.py one after the other, each in a separate process with a time-out, and continues after a
failure. The first stages with time-outs that together fit into --limit always have their full time. Later stages share
the remaining time. Fewer stages (--only) have more time each. Writes to --out: <stage>.log, the measurements of the
stages, and, after every stage, summary.json and summary.md. At the end it copies summary and measurements to
benchmarks/results/<gpu>/, to be committed, unless --quick or --only is given. The exit status is 0 if no stage failed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ROOT
from tools.gpu.stages import Stage, stages

SKIPPED = 77  # the exit status of a stage that lacks a tool; its last line names the tool
GRACE = 1.0  # seconds between the request to end a stage and its kill, and for its end after the kill
OVERHEAD = 2 * GRACE + 0.5  # seconds that a stage may take after its time-out: to end, and for the summary
SHORTEST = 10.0  # a stage with a longer time-out than the remaining seconds starts if at least this many remain
MACHINE_SECONDS = 25.0  # for machine.py
NO_TIME = "no time left"
RESULTS = ROOT / "benchmarks" / "results"
FAILURES = ("failed", "timed out", "not started")


@dataclass(frozen=True)
class Result:
    stage: str
    status: str  # ok, skipped, NO_TIME, or one of FAILURES
    seconds: float
    timeout: float
    says: str  # the last line of its output


def run(stage: Stage, log: Path, timeout: float) -> Result:
    """Runs a stage. Its output is written to the log immediately, so the log is complete even if this process ends."""
    start = time.monotonic()
    given = {"PYTHONUNBUFFERED": "1", "GPU_STAGE_END": f"{time.time() + timeout:.1f}"}
    environment = os.environ | given | stage.environment
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                stage.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Result(stage.name, "not started", 0.0, timeout, str(error))
        try:
            code = process.wait(timeout)
            status = {0: "ok", SKIPPED: "skipped"}.get(code, "failed")
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            end(process)
    return Result(stage.name, status, time.monotonic() - start, timeout, last_line(log))


def end(process: subprocess.Popen) -> None:
    """Ends the process and all processes that it started.

    First requests the end, so that a compiler removes its files. A process that the GPU's driver holds may survive a
    kill; this function does not wait for it.
    """
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def seconds_of(chosen: list[Stage], limit: float) -> list[float]:
    """Returns the time limit of each stage: its time-out, or more if the sum is below the limit.

    0 means the remaining time: for the first stage that does not fit into the limit, and for all later stages.
    """
    wanted = sum(stage.timeout for stage in chosen)
    factor = max(1.0, (limit - len(chosen) * OVERHEAD) / wanted)
    result, total = [], 0.0
    for stage in chosen:
        total += stage.timeout * factor + OVERHEAD
        result.append(stage.timeout * factor if total <= limit else 0.0)
    return result


def run_all(chosen: list[Stage], out: Path, machine: dict, limit: float, pack: Path | None) -> list[Result]:
    """Runs the stages within `limit` seconds. If no time remains, a stage does not start.

    This is no failure; the summary lists it.
    """
    end_of_all = time.monotonic() + limit
    reasons = {stage.name: why_not(stage, machine) for stage in chosen}
    results = [Result(name, "skipped", 0.0, 0.0, reason) for name, reason in reasons.items() if reason]
    chosen = [stage for stage in chosen if not reasons[stage.name]]
    for stage, seconds in zip(chosen, seconds_of(chosen, limit), strict=True):
        for old in out.glob(f"{stage.name}.*"):  # of an earlier run
            old.unlink()
        left = end_of_all - time.monotonic() - OVERHEAD
        allowed = min(seconds or stage.timeout, left)
        if allowed >= min(stage.timeout, SHORTEST):
            print(f"{stage.name}: up to {allowed:.0f} s ...", flush=True)
            results.append(run(stage, out / f"{stage.name}.log", allowed))
        else:
            says = f"{max(left, 0):.0f} s were left; run it by --only {stage.name}"
            results.append(Result(stage.name, NO_TIME, 0.0, stage.timeout, says))
        print(f"{stage.name}: {results[-1].status}, {results[-1].seconds:.1f} s: {results[-1].says}", flush=True)
        write_summary(results, out, machine)
        if pack:
            write_pack(out, pack)
    return results


def why_not(stage: Stage, machine: dict) -> str:
    """Returns why the stage is not for the machine's GPU.

    Empty if it is, or if torch sees no GPU, because the stage reports this.
    """
    capability = machine.get("compute capability")
    if capability is None or int(capability.replace(".", "")) in stage.gpus:
        return ""
    allowed = f"{stage.gpus[0] / 10}" + (" or later" if len(stage.gpus) > 1 else "")
    return f"needs compute capability {allowed}; the GPU has {capability}"


def write_summary(results: list[Result], out: Path, machine: dict) -> None:
    record = {"machine": machine, "stages": [asdict(result) for result in results]}
    (out / "summary.json").write_text(json.dumps(record, indent=1) + "\n")
    tables = [
        (path.stem, path.read_text()) for path in (out / f"{result.stage}.txt" for result in results) if path.exists()
    ]
    # The stages are last, because machines often return only the end of a long output.
    (out / "summary.md").write_text("".join(f"## {n}\n\n{t}\n" for n, t in tables) + markdown(results, machine))


def markdown(results: list[Result], machine: dict) -> str:
    lines = ["# make gpu", "", *(f"- {key}: {value}" for key, value in machine.items()), ""]
    lines += ["| stage | status | seconds | time-out | last line of its log |", "|---|---|---:|---:|---|"]
    for result in results:
        says = result.says[:160].replace("|", "\\|")
        lines.append(f"| {result.stage} | {result.status} | {result.seconds:.1f} | {result.timeout:.0f} | {says} |")
    return "\n".join(lines) + "\n"


def write_pack(out: Path, pack: Path) -> None:
    """Writes the summary, and one archive of all of `out`, for a machine that returns only few files."""
    pack.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "summary.md", pack)
    with tarfile.open(pack / "results.tar.gz", "w:gz") as archive:
        archive.add(out, arcname="results")


def results_folder(machine: dict) -> Path | None:
    """Returns the folder of the committed results: benchmarks/results/h200 for "NVIDIA H200, 1 of them".

    None without a GPU.
    """
    if "compute capability" not in machine:
        return None
    name = re.sub(r"^nvidia |,.*", "", machine["GPU"].lower())
    return RESULTS / re.sub(r"[^a-z0-9]+", "_", name).strip("_")


def copy_results(out: Path, folder: Path) -> None:
    """Copies the summary and the measurements, without logs. Removes files of an earlier run, and keeps other files."""
    folder.mkdir(parents=True, exist_ok=True)
    written_by_runs = {"summary", *(stage.name for stage in stages(out, quick=False))}
    for path in folder.iterdir():
        if path.stem in written_by_runs:
            path.unlink()
    for path in sorted(out.iterdir()):
        if path.suffix in (".md", ".txt", ".json", ".png"):
            shutil.copy(path, folder)


def describe(commit: str | None) -> dict:
    """Describes the machine in a separate process, because torch or the driver may fail or hang."""
    facts = {"time": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "commit": commit or current_commit(), "python": sys.version}
    command = [sys.executable, "-m", "tools.gpu.machine"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MACHINE_SECONDS)
    except subprocess.TimeoutExpired:
        return facts | {"machine": "unknown: machine.py hung"}
    return facts | (json.loads(done.stdout) if done.returncode == 0 else {"machine": done.stderr.strip()[-300:]})


def current_commit() -> str:
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git here; say --commit"
    return head + (" with changes" if changed else "")


def choose(all_stages: list[Stage], names: Iterable[str] | None) -> list[Stage]:
    stage_names = [stage.name for stage in all_stages]
    unknown = sorted(set(names or ()) - set(stage_names))
    if unknown:
        sys.exit(f"--only: got {', '.join(unknown)}; allowed: {', '.join(stage_names)}")
    return [stage for stage in all_stages if not names or stage.name in names]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="default: build/gpu")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages, in the usual order")
    parser.add_argument("--list", action="store_true", help="print the stages, their time-outs and commands")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems: for a look, not to publish")
    parser.add_argument("--limit", type=float, default=580, help="seconds from start to end; default 580")
    parser.add_argument("--commit", help="the measured commit, if there is no git repository")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="also write the summary and one archive there")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()  # the stages run elsewhere
    return args


def main(argv: list[str] | None = None) -> int:
    start, args = time.monotonic(), parse(argv)
    chosen = choose(stages(args.out, args.quick), args.only)
    if args.list:
        for stage in chosen:
            settings = "".join(f"{key}={value} " for key, value in stage.environment.items())
            print(f"{stage.name:10} {stage.timeout:4.0f} s  {settings}{' '.join(stage.command)}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    machine = describe(args.commit)
    for fact in ("setuptools", "missing packages"):
        if "pip install" in machine.get(fact, ""):
            print(f"{fact}: {machine[fact]}", flush=True)
    results = run_all(chosen, args.out, machine, args.limit - (time.monotonic() - start), args.pack)
    print((args.out / "summary.md").read_text())
    failed = [result.stage for result in results if result.status in FAILURES]
    not_run = [result.stage for result in results if result.status == NO_TIME]
    print(f"failed: {', '.join(failed)}" if failed else "no stage failed")
    if not_run:
        print(f'no time was left for these: make gpu GPU="--only {" ".join(not_run)}"')
    print(f"everything is in {args.out}")
    folder = results_folder(machine)
    if folder and not args.quick and not args.only:
        copy_results(args.out, folder)
        print(f"ready to commit: git add {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
