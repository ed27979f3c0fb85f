"""What was built, and which kernels run."""

from ._ops import _C


def build_info() -> dict:
    """How the extension was built: torch version, compiler, CUDA half or not, OpenMP or not, largest head_dim."""
    return _C.build_info()


def available_kernels() -> list[str]:
    """Instruction sets whose CPU kernels this build has and this machine can run, slowest first."""
    return _C.available_kernels()


def active_kernel() -> str:
    """The instruction set whose CPU kernels run: forced, else the last of :func:`available_kernels`."""
    return _C.active_kernel()


def force_kernel(isa: str | None) -> None:
    """Pins the CPU kernels of one instruction set for this process; ``None`` returns to detection.

    The environment variable ``FLASH_ATTN_EXT_ISA`` does the same from outside.

    Raises:
        ValueError: ``isa`` is not in :func:`available_kernels`. Nothing changes then.
    """
    _C.force_kernel(isa or "")


def force_cuda_tier(tier: str | None) -> None:
    """Lets only one tier of CUDA kernels run in this process: "simt", "sm80" or "sm90"; ``None`` lets the call decide.

    A call that the forced tier cannot run raises NotImplementedError with the tier's reason: nothing else runs in its
    place. The environment variable ``FLASH_ATTN_EXT_CUDA_TIER`` does the same from outside.

    Raises:
        ValueError: ``tier`` is not a tier, or this build has no CUDA half. Nothing changes then.
    """
    _C.force_cuda_tier(tier or "")
