"""The error rule (shared/design.md): our error is at most a stated factor times torch's error in the same dtype."""

import torch

ULPS_16BIT = 4
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def largest_error(ours, exact):
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(ours), finite), "finite and non-finite values must be in the same places"
    assert torch.equal(ours[~finite].double(), exact[~finite].double()) or exact[~finite].isnan().any()
    return (ours.double() - exact.double())[finite].abs().max().item() if finite.any() else 0.0


def assert_as_exact_as_torch(name, ours, theirs, exact, factor, slack=0.0):
    """error(ours) <= factor * error(theirs) + slack + a few ulp of the largest value.

    Errors are against the fp64 `exact`.
    """
    error = largest_error(ours, exact)
    finite = exact[torch.isfinite(exact)].abs()
    # Inputs are of order 1: where a gradient cancels to nearly nothing, its terms still round like 0.1.
    scale = max(finite.max().item() if finite.numel() else 0.0, 0.1)
    relative = {torch.float32: 1e-5, torch.float64: 1e-12}.get(ours.dtype, 0.0)
    ulps = ULPS_16BIT if ours.dtype in (torch.bfloat16, torch.float16) else 0
    allowed = max(factor * largest_error(theirs, exact) + slack + ulps * EPS[ours.dtype] * scale, relative * scale)
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (largest value {scale:.3e})"


def slack_of_delta(out, lse, inputs, grad_out, dtype):
    """The error of each gradient if only delta = rowsum(dO o O) is rounded, from the fp64 results.

    dS = P o (dP - delta), so its error is a gradient of lse by -(error of delta). The backward's delta sees the O that
    was stored, in `dtype`, and sums in fp32 or fp64. In a row with one visible key dP - delta cancels to 0 and leaves
    the rounding of the sum. torch's dense backward keeps P instead, at the price of N x N memory.
    """
    if dtype in (torch.bfloat16, torch.float16):
        error = (grad_out * (out - out.to(dtype))).sum(-1)
    else:
        error = EPS[dtype] * (grad_out * out).abs().sum(-1)
    error = error.nan_to_num(0.0).masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad(lse, inputs, error, retain_graph=True, allow_unused=True)
    return [0.0 if g is None or g.numel() == 0 else 2 * g.abs().max().item() for g in grads]
