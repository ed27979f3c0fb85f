"""Information about the build, and the choice of kernels."""

from ._ops import _C


def build_info() -> dict:
    """Returns torch's version, the compiler, whether CUDA and OpenMP are in the build, and the largest head_dim."""
    return _C.build_info()


def available_kernels() -> list[str]:
    """Returns the instruction sets of this build's CPU kernels that this machine can run, slowest first."""
    return _C.available_kernels()


def active_kernel() -> str:
    """Returns the instruction set in use: the forced one, otherwise the last of :func:`available_kernels`."""
    return _C.active_kernel()


def force_kernel(isa: str | None) -> None:
    """Makes this process run the CPU kernels of one instruction set; ``None`` returns to detection.

    The environment variable ``FLASH_ATTN_EXT_ISA`` has the same effect.

    Raises:
        ValueError: ``isa`` is not in :func:`available_kernels`. Nothing changes then.
    """
    _C.force_kernel(isa or "")


def force_cuda_tier(tier: str | None) -> None:
    """Makes this process run one tier of CUDA kernels: "simt", "sm75", "sm80" or "sm90". ``None``: each call chooses.

    A call that the forced tier cannot run raises NotImplementedError with the tier's reason; no other tier runs.
    The environment variable ``FLASH_ATTN_EXT_CUDA_TIER`` has the same effect.

    Raises:
        ValueError: ``tier`` is not a tier, or this build has no CUDA kernels. Nothing changes then.
    """
    _C.force_cuda_tier(tier or "")
