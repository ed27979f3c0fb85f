"""One run of train_long.py in the process that computes it: steps, validation, and a checkpoint to continue from."""

import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from bfloat16_linear import Float32Products, has_fast_products
from gpt_model import GPT, Shape
from packed_attention import PackedAttention
from packed_text import Documents, Pack, packs, validation_packs
from stdlib_text import VOCABULARY
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_distributed import rotate_by
from training_process import memory_in_use, peak_memory

import flash_attn_ext
from flash_attn_ext.distributed import shard_sequence

WARM_UP_STEPS = 100


@dataclass(frozen=True)
class Settings:
    """The settings that all runs share. The default model has 11.4 million parameters."""

    context: int = 2048
    d_model: int = 384
    heads: int = 6
    layers: int = 6
    learning_rate: float = 1e-3
    validate_every: int = 50  # steps
    validation_packs: int = 4
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then 1 / sqrt(step), which does not need the unknown number of steps."""
        return self.learning_rate * min((step + 1) / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / (step + 1)))


@dataclass
class History:
    """The numbers of a run. Each list but `validation` has one number for each step."""

    loss: list[float] = field(default_factory=list)  # nats per token
    seconds: list[float] = field(default_factory=list)  # wall clock, of the step alone
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads and processes of the run
    documents: list[int] = field(default_factory=list)  # in the step's pack
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    peak_memory: int = 0  # bytes, of the process with the largest peak
    memory_at_start: int = 0  # bytes, before the model was made
    kernel: str | None = None
    linear_products: str = "float32"  # the arithmetic of the linear layers' products


@dataclass(frozen=True)
class Member:
    """A process of a run."""

    rank: int
    processes: int  # of the run
    threads: int  # the number of threads of this process
    rendezvous: Path  # a file through which the processes find each other


class LongTrainer:
    """A GPT, its optimiser and its packs. In a run of several processes each process has a part of every pack."""

    def __init__(self, settings: Settings, way: str, dtype: str, data: Path, checkpoint: Path, member: Member):
        torch.set_num_threads(member.threads)
        if member.processes > 1:
            dist.init_process_group("gloo", init_method=f"file://{member.rendezvous}", rank=member.rank,
                                    world_size=member.processes, timeout=timedelta(minutes=5))  # fmt: skip
        self.settings, self.dtype, self.checkpoint, self.member = settings, dtype, checkpoint, member
        documents: Documents = torch.load(data, weights_only=False)
        self.history = History(memory_at_start=memory_in_use("cpu"))
        self.history.kernel = None if way == "torch" else str(flash_attn_ext.active_kernel())
        if dtype == "bfloat16" and has_fast_products():
            self.history.linear_products = "bfloat16"
        torch.manual_seed(settings.seed)
        self.attention = PackedAttention(way)
        sizes = Shape(VOCABULARY, settings.context, settings.d_model, settings.heads, settings.layers)
        self.model = GPT(sizes, self.attention)
        if member.processes > 1:
            rotate_by(self.model, shard_sequence(torch.arange(settings.context), 0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        if checkpoint.exists():
            self._load()
        endless = packs(documents.train, documents.train_lengths, settings.context, settings.seed)
        self.packs = islice(endless, len(self.history.loss), None)
        self.validation = validation_packs(documents, settings.context, settings.validation_packs)

    def step(self) -> History:
        """Runs one optimiser step, and every `validate_every` steps a validation. Returns all numbers so far."""
        pack, done = next(self.packs), len(self.history.loss)
        start, cpu_start = time.perf_counter(), time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(done)
        loss = self._loss(pack)
        self.optimizer.zero_grad()
        loss.backward()
        self._sum_over_processes([weight.grad for weight in self.model.parameters()])
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss, cpu = loss.detach(), torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
        self.history.seconds.append(time.perf_counter() - start)
        self._sum_over_processes([loss, cpu])
        self.history.loss.append(loss.item())
        self.history.cpu_seconds.append(cpu.item())
        self.history.documents.append(len(pack.cu_seqlens) - 1)
        if (done + 1) % self.settings.validate_every == 0:
            self.history.validation.append((done + 1, self._validation_loss()))
        self.history.peak_memory = max(self.history.peak_memory, peak_memory("cpu"))
        return self.history

    def past(self) -> History:
        """Returns the numbers so far."""
        return self.history

    def save(self) -> None:
        """Writes the checkpoint of the run. A crash in the middle leaves the old checkpoint."""
        if self.member.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            state |= {"history": asdict(self.history), "settings": asdict(self.settings)}
            new = self.checkpoint.with_suffix(".new")
            torch.save(state, new)
            new.replace(self.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.checkpoint)
        if state["settings"] != asdict(self.settings):
            raise ValueError(
                f"settings: got {asdict(self.settings)}; allowed: the settings of {self.checkpoint}, "
                f"{state['settings']}, or another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History(**state["history"])

    def _loss(self, pack: Pack) -> Tensor:
        """Returns this process's part of the mean loss of a token: the parts of all processes add up to the mean."""
        self.attention.set_pack(pack)
        inputs, targets = pack.inputs, pack.targets
        if self.member.processes > 1:
            inputs, targets = shard_sequence(inputs, 0), shard_sequence(targets, 0)
        with ExitStack() as context:
            if self.dtype == "bfloat16":
                context.enter_context(torch.autocast("cpu", torch.bfloat16))
                if self.history.linear_products == "float32":
                    context.enter_context(Float32Products())
            logits = self.model(inputs[None])[0]
        return cross_entropy(logits.float(), targets, reduction="sum") / len(pack.targets)

    @torch.no_grad()
    def _validation_loss(self) -> float:
        loss = torch.stack([self._loss(pack) for pack in self.validation]).mean()
        self._sum_over_processes([loss])
        return loss.item()

    def _sum_over_processes(self, tensors: list[Tensor]) -> None:
        if self.member.processes > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
