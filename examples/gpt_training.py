"""One training run, which the caller controls step by step."""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from gpt_model import GPT, Shape, attention_by_name
from stdlib_text import VOCABULARY, Batch, Corpus, random_windows
from training_process import memory_in_use, peak_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
VALIDATION_BATCHES = 8
WARM_UP_STEPS = 40
PROMPT = b"\n    def "


@dataclass(frozen=True)
class Settings:
    """The settings that all runs share. The defaults are the demo's."""

    steps: int = 200
    batch_size: int = 2
    context: int = 1024
    d_model: int = 128
    heads: int = 2
    layers: int = 4
    learning_rate: float = 2e-3
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, int | float) and name != "seed" and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")

    def shape(self) -> Shape:
        return Shape(VOCABULARY, self.context, self.d_model, self.heads, self.layers)

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth. A run shorter than the warm-up never leaves it."""
        if step < WARM_UP_STEPS:
            return self.learning_rate * (step + 1) / WARM_UP_STEPS
        progress = (step - WARM_UP_STEPS) / (self.steps - WARM_UP_STEPS)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Step:
    """The results of one optimiser step: the loss before it, the gradient's norm before clipping, the seconds."""

    loss: float
    grad_norm: float
    seconds: float


class Trainer:
    """A model, its optimiser and its batches. Nothing here depends on the attention."""

    def __init__(self, settings: Settings, attention_name: str, corpus: Corpus):
        self.settings, self.corpus = settings, corpus
        self.memory_at_start = memory_in_use(settings.device)
        torch.manual_seed(settings.seed)
        self.model = GPT(settings.shape(), attention_by_name(attention_name))
        self.model.to(settings.device, torch.float64 if settings.dtype == "float64" else torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.batches = random_windows(corpus.train, settings.batch_size, settings.context, settings.seed)
        self.steps_done = 0
        self.first_gradients: dict[str, float] = {}

    def step(self) -> Step:
        """Runs one optimiser step. The time is from the batch on the device to the updated parameters."""
        inputs, targets = self._on_device(next(self.batches))
        self._synchronize()
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.steps_done)
        with self._precision():
            loss = self.model.loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        if self.steps_done == 0:
            self.first_gradients = {name: norm(weight.grad) for name, weight in self.model.named_parameters()}
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._synchronize()
        seconds = time.perf_counter() - start
        self.steps_done += 1
        return Step(loss.item(), grad_norm.item(), seconds)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Returns the mean loss over fixed windows of files that training never sees."""
        size, context, seed = self.settings.batch_size, self.settings.context, self.settings.seed + 1
        batches = islice(random_windows(self.corpus.validation, size, context, seed), VALIDATION_BATCHES)
        with self._precision():
            losses = [self.model.loss(*self._on_device(batch)) for batch in batches]
        return torch.stack(losses).mean().item()

    def memory(self) -> tuple[int, int]:
        """Returns bytes: the peak so far, and the memory in use before the model was made."""
        return peak_memory(self.settings.device), self.memory_at_start

    def first_gradient_norms(self) -> dict[str, float]:
        """Returns the norm of every parameter's gradient in the first step, before clipping."""
        return self.first_gradients

    def sample(self, characters: int) -> str:
        """Returns text that the model writes after PROMPT."""
        tokenizer = self.corpus.tokenizer
        with self._precision():  # a token has one or more characters
            written = self.model.generate(tokenizer.encode(PROMPT).tolist(), characters, self.settings.seed)
        return tokenizer.decode(written)[: characters + len(PROMPT)].decode(errors="replace").lstrip("\n")

    def kernel(self) -> str | None:
        """Returns the name of the kernel that ran, or None if flash_attn_ext did not run here."""
        tell = getattr(sys.modules.get("flash_attn_ext"), "active_kernel", None)
        return str(tell()) if tell else None

    def _on_device(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.settings.device), targets.to(self.settings.device)

    def _precision(self):
        if self.settings.dtype == "bfloat16":  # parameters stay float32
            return torch.autocast(torch.device(self.settings.device).type, torch.bfloat16)
        return nullcontext()

    def _synchronize(self) -> None:
        if self.settings.device.startswith("cuda"):
            torch.cuda.synchronize()


def norm(gradient: torch.Tensor | None) -> float:
    """Returns the norm, or 0 for a parameter without a gradient."""
    return 0.0 if gradient is None else gradient.norm().item()
