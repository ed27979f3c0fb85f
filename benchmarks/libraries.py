"""Models of other libraries on random weights: unchanged torch against activate(), in turns in one process.

    python -m benchmarks.libraries flux dit sentence vit eva swin lightning

It compares each model with an installed library. It prints the largest relative difference of the outputs, and the
calls on our and on torch's kernels. It also prints the median ratio of the times (above 1: ours is faster) with
quartiles.
"""

import argparse
import importlib
import importlib.util
import re
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

import flash_attn_ext

Step = Callable[[], torch.Tensor]


def backward_too(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    output.float().square().mean().backward()
    return output.detach()


def flux(small: bool) -> Step:
    from diffusers import FluxTransformer2DModel

    heads, side, text = (2, 4, 8) if small else (8, 32, 128)
    model = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1 if small else 2, attention_head_dim=64 if not small else 16,
        num_attention_heads=heads, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24) if not small else (4, 4, 8),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, side * side, 16), "encoder_hidden_states": torch.randn(1, text, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(side * side, 3), "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip

    @torch.no_grad()
    def step():
        return model(**inputs, return_dict=False)[0]

    step.model = model
    return step


def dit(small: bool) -> Step:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2 if small else 6, attention_head_dim=16 if small else 64, num_layers=2,
        sample_size=8 if small else 64, patch_size=2, norm_num_groups=4,
    ).eval()  # fmt: skip
    image, label = torch.randn(1, 4, 8 if small else 64, 8 if small else 64), torch.tensor([1])

    @torch.no_grad()
    def step():
        return model(image, timestep=torch.tensor([1]), class_labels=label, return_dict=False)[0]

    step.model = model
    return step


def sentence(small: bool) -> Step:
    from sentence_transformers import models
    from transformers import BertConfig, BertModel

    width, length = (32, 16) if small else (384, 512)
    config = BertConfig(
        hidden_size=width, num_attention_heads=2 if small else 12, num_hidden_layers=2 if small else 6,
        intermediate_size=4 * width, attn_implementation="sdpa",
    )  # fmt: skip
    bert, pooling = BertModel(config).eval(), models.Pooling(width)
    tokens, mask = torch.randint(1000, (4, length)), torch.ones(4, length, dtype=torch.long)
    mask[1, length // 2 :] = 0

    @torch.no_grad()
    def step():
        found = bert(tokens, attention_mask=mask).last_hidden_state
        return pooling({"token_embeddings": found, "attention_mask": mask})["sentence_embedding"]

    return step


def import_beside_torchvision(name: str) -> ModuleType:
    """Imports torchvision's module ``name``, or a library that imports torchvision, such as timm.

    torchvision's C++ operators load only with a CUDA build of torch. Otherwise an import stops at the first undeclared
    operator. Attention uses none of them, so they are declared without a kernel.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(10):
        try:
            return importlib.import_module(name)
        except RuntimeError as error:
            missing = re.fullmatch(r"operator torchvision::(\w+) does not exist", str(error))
            if not missing:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
    raise ImportError("torchvision still misses an operator after 10 declarations")


def timm_model(name: str, **options):
    def build(small: bool) -> Step:
        timm = import_beside_torchvision("timm")
        size = 64 if small else 384
        model = timm.create_model(name, img_size=size, **options)
        image = torch.randn(1, 3, size, size)
        return lambda: backward_too(model, model(image))

    return build


def lightning(small: bool) -> Step:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            width = 32 if small else 256
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2)

        def training_step(self, batch, index):
            return self.body(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    data = torch.utils.data.TensorDataset(torch.randn(2, 16 if small else 1024, 32 if small else 256))

    def step():
        module.load_state_dict(initial)
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1))
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    return step


# name: the required library, and a function that makes the step
MODELS: dict[str, tuple[str, Callable[[bool], Step]]] = {
    "flux": ("diffusers", flux),
    "dit": ("diffusers", dit),
    "sentence": ("sentence_transformers", sentence),
    "vit": ("timm", timm_model("vit_tiny_patch16_224")),
    "eva": ("timm", timm_model("eva02_tiny_patch14_224")),
    "swin": ("timm", timm_model("swinv2_cr_tiny_224")),
    "lightning": ("lightning", lightning),
}


def compare(name: str, small: bool, runs: int) -> str:
    """One row: difference, calls, ratio of the times."""
    torch.manual_seed(0)
    step = MODELS[name][1](small)
    expected = step()
    flash_attn_ext.activation_report(reset=True)
    flash_attn_ext.activate()
    try:
        found = step()
        report = flash_attn_ext.activation_report()
    finally:
        flash_attn_ext.deactivate()
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    ratios = []
    for _ in range(runs):
        started = time.perf_counter()
        step()
        middle = time.perf_counter()
        with flash_attn_ext.activated():
            step()
        ratios.append((middle - started) / (time.perf_counter() - middle))
    speed = f"{statistics.median(ratios):.2f}" if ratios else ""
    if len(ratios) > 3:
        low, _, high = statistics.quantiles(ratios, n=4)
        speed += f" ({low:.2f} to {high:.2f})"
    return f"{name}: difference {difference:.1e}; torch's time / ours {speed}; {' '.join(str(report).split())}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args(arguments)
    for name in options.models:
        library = MODELS[name][0]
        if importlib.util.find_spec(library) is None:
            print(f"{name}: not run, {library} is not installed")
            continue
        print(compare(name, options.small, options.runs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
