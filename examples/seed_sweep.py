"""Tries the demo's verdict with many seeds and with every instruction set of this machine.

    python examples/seed_sweep.py --seeds 10

Prints a line for each run, with two numbers for each check of loss_agreement.py. The first is the distance of this
project's run from the run of torch's math kernel. The second, in parentheses, is the same distance in units of the
distance of torch's default kernel.
"""

import argparse
from dataclasses import fields

import torch
from gpt_training import Settings, Trainer
from loss_agreement import ROUNDING, Check, Curves, compare
from stdlib_text import Corpus, load_corpus

import flash_attn_ext

SMALL = {"steps": 400, "context": 128, "d_model": 128, "heads": 2, "layers": 4}
VALIDATE_EVERY = 50


def train(settings: Settings, attention: str, corpus: Corpus) -> Curves:
    trainer = Trainer(settings, attention, corpus)
    loss, validation = [], []
    for step in range(1, settings.steps + 1):
        loss.append(trainer.step().loss)
        if step % VALIDATE_EVERY == 0:
            validation.append(trainer.validation_loss())
    return Curves(loss, validation, trainer.first_gradient_norms())


def ratio(check: Check) -> float:
    return check.difference / check.yardstick if check.yardstick else float("inf") if check.difference else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds 0 to N - 1 (default: 10)")
    for setting in fields(Settings):
        if setting.name in SMALL:
            option, value = "--" + setting.name.replace("_", "-"), SMALL[setting.name]
            parser.add_argument(option, type=int, default=value, metavar="N", help=f"(default: {value})")
    arguments = vars(parser.parse_args())
    seeds = arguments.pop("seeds")
    torch.set_num_threads(1)
    corpus, rounding = load_corpus(), ROUNDING["float32"]
    worst: dict[str, float] = {}
    disagree = 0
    for seed in range(seeds):
        settings = Settings(seed=seed, **arguments)
        reference, yardstick = (train(settings, name, corpus) for name in ("sdpa-math", "sdpa"))
        for kernel in flash_attn_ext.available_kernels():
            flash_attn_ext.force_kernel(kernel)
            checks = compare(reference, yardstick, train(settings, "flash_attn_ext", corpus), rounding)
            agree = all(check.passed for check in checks)
            disagree += not agree
            print(f"seed {seed} {kernel:<12} {'agrees' if agree else 'DIFFERS'}", end="")
            for check in checks:
                worst[check.name] = max(worst.get(check.name, 0.0), ratio(check))
                print(f"  {check.difference:.1e} ({ratio(check):.2f})", end="")
            print(flush=True)
    print("largest ratios: " + ", ".join(f"{name}: {value:.2f}" for name, value in worst.items()))
    print(f"{disagree} of {seeds * len(flash_attn_ext.available_kernels())} runs differ")


if __name__ == "__main__":
    main()
