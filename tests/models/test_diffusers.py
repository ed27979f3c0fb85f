"""diffusers' registry of backends, and models of other libraries under activate() at a tiny size."""

import importlib.util

import pytest
import torch

from benchmarks import libraries

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", list(libraries.MODELS))
def test_a_model_under_activate(name):
    library = libraries.MODELS[name][0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}, in an environment of its own")
    row = libraries.compare(name, small=True, runs=0)
    assert float(row.split("difference ")[1].split(";")[0]) < 1e-5
    assert ("none" in row) == (name == "swin"), row  # Swin computes attention by matrix products


@pytest.fixture
def dispatch():
    pytest.importorskip("diffusers", reason="needs diffusers, in an environment of its own")
    from diffusers.models import attention_dispatch

    return attention_dispatch


def test_a_model_on_the_backend_of_diffusers_registry(dispatch):
    from flash_attn_ext.integrations.diffusers import register

    step = libraries.flux(small=True)
    expected = step()
    calls = dispatch._AttentionBackendRegistry._backends
    step.model.set_attention_backend(register())
    name = dispatch.AttentionBackendName(register())
    used, ours = [], calls[name]
    calls[name] = lambda **arguments: used.append(1) or ours(**arguments)
    try:
        torch.testing.assert_close(step(), expected, rtol=1e-5, atol=1e-5)
    finally:
        calls[name] = ours
    assert len(used) == 2


def test_masks_the_logsumexp_and_the_refusal(dispatch):
    from flash_attn_ext.integrations.diffusers import attention, register

    q, k, v = torch.randn(3, 2, 7, 4, 16).unbind()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), mask[:, None, None, :]
    ).transpose(1, 2)
    found = dispatch.dispatch_attention_fn(q, k, v, mask, backend=register())
    torch.testing.assert_close(found, expected)
    _, lse = attention(q, k, v, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    with pytest.raises(ValueError, match="parallel_config"):
        attention(q, k, v, _parallel_config=object())
