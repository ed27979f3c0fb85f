"""How the extension was built, and which kernels run."""

from ._ops import _C


def build_info() -> dict:
    """How the extension was built: torch version, compiler, with CUDA or not, OpenMP or not, largest head_dim."""
    return _C.build_info()


def available_kernels() -> list[str]:
    """The instruction sets that this build has CPU kernels for and this machine can run, slowest first."""
    return _C.available_kernels()


def active_kernel() -> str:
    """The instruction set of the CPU kernels that run: forced, else the last of :func:`available_kernels`."""
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
        ValueError: ``tier`` is not a tier, or this build has no CUDA half. Nothing changes then.
    """
    _C.force_cuda_tier(tier or "")
