"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), under the names of flash_attn.layers.rotary."""

import torch
from torch import Tensor

from .._flash_arguments import whole_number
from .._tensor_checks import check_are_dense, check_is_dense


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first R columns of ``x`` (..., D) by cos, sin (..., R / 2). Computes in float32 or float64."""
    half = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    columns, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos.to(dtype), sin.to(dtype)
    if interleaved:
        a, b = columns[..., ::2], columns[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = columns[..., :half], columns[..., half:]
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((rotated.to(x.dtype), rest), -1)


_INTS = (torch.int32, torch.int64)


def _check_offsets(cu_seqlens: Tensor, rows: int) -> None:
    check_is_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in _INTS:
        got = f"shape {list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens: got {got}; allowed: (sequences + 1) of int32 or int64")
    if cu_seqlens.is_cpu and not torch.compiler.is_compiling():
        wrong = cu_seqlens[0] != 0 or cu_seqlens[-1] != rows or (cu_seqlens.diff() < 0).any()
        if wrong:
            raise ValueError(f"cu_seqlens: got {cu_seqlens.tolist()}; allowed: offsets that ascend from 0 to {rows}")


def check_rotary(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    check_are_dense({"cos": cos, "sin": sin}, ("cos", "sin"))
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(f"sin: got shape {list(sin.shape)}; allowed: cos's shape, (positions, rotary_dim / 2)")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos: got rotary_dim {2 * cos.shape[1]}; allowed: at most head_dim, {head_dim}")


def rows_at(table: Tensor, name: str, positions: Tensor) -> Tensor:
    """Returns rows of cos or sin. On CPU a position outside the table raises. On a GPU indexing reports it."""
    if positions.is_cpu and positions.numel() and not torch.compiler.is_compiling():
        low, high = positions.min().item(), positions.max().item()
        if low < 0 or high >= len(table):
            raise ValueError(
                f"{name}: got positions {low} to {high}; allowed: 0 to {len(table) - 1}, the rows of {name}"
            )
    return table[positions]


def _rows_of_tables(
    cos: Tensor, sin: Tensor, x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns rows of cos and sin for ``x``: (B, S, 1, rotary_dim / 2), or (T, 1, rotary_dim / 2) if packed."""
    check_rotary(cos, sin, x.shape[-1])
    sequences = x.shape[0]
    if cu_seqlens is not None:
        _check_offsets(cu_seqlens, x.shape[0])
        sequences = len(cu_seqlens) - 1
    by_sequence = isinstance(seqlen_offsets, Tensor) and seqlen_offsets.dim() > 0
    if by_sequence and (seqlen_offsets.shape != (sequences,) or seqlen_offsets.dtype not in _INTS):
        raise ValueError(
            f"seqlen_offsets: got shape {list(seqlen_offsets.shape)} of {seqlen_offsets.dtype}; allowed: an int, or "
            f"({sequences},) of int32 or int64"
        )
    offset = seqlen_offsets if by_sequence else whole_number("seqlen_offsets", seqlen_offsets) or 0
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        positions = positions + (offset[:, None] if by_sequence else offset)
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].to(rows.dtype), rows, right=True)
        positions = rows - cu_seqlens[sequence] + (offset[sequence] if by_sequence else offset)
    return rows_at(cos, "cos", positions)[..., None, :], rows_at(sin, "sin", positions)[..., None, :]


class _RotateLeaf(torch.autograd.Function):
    """Writes to a leaf that requires a gradient. torch's in-place operators refuse this.

    The gradient of the leaf belongs to its values before the rotation.
    """

    @staticmethod
    def forward(ctx, x: Tensor, interleaved: bool, parts: list[tuple]) -> Tensor:
        ctx.interleaved, ctx.parts = interleaved, parts
        _rotate_parts(x.detach(), interleaved, parts)
        return x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        inverse = [(part, cos, -sin) for part, cos, sin in ctx.parts]
        return _rotate_parts(gradient.clone(), ctx.interleaved, inverse), None, None


def _rotate_parts(x: Tensor, interleaved: bool, parts: list[tuple]) -> Tensor:
    """Rotates ``x[part]`` by cos and sin, in place, for each (part, cos, sin)."""
    for part, cos, sin in parts:
        x[part].copy_(rotate(x[part], cos, sin, interleaved))
    return x


def _rotate_in_place(x: Tensor, interleaved: bool, parts: list[tuple]) -> Tensor:
    if not (x.is_leaf and x.requires_grad and torch.is_grad_enabled()):
        return _rotate_parts(x, interleaved, parts)
    for _, cos, sin in parts:
        for name, table in (("cos", cos), ("sin", sin)):
            if table.requires_grad:
                raise NotImplementedError(
                    f"{name}: got a tensor that requires a gradient; allowed where a leaf is rotated in place: tensors "
                    "that require none"
                )
    return _RotateLeaf.apply(x, interleaved, parts)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first ``rotary_dim`` columns of each head by the row's position.

    Args:
        x: (B, S, H, D), or (T, H, D) with ``cu_seqlens``.
        cos: (positions, rotary_dim / 2); rotary_dim is at most D. Further columns of ``x`` stay as they are.
        sin: (positions, rotary_dim / 2).
        interleaved: True: pairs of columns are (0, 1), (2, 3), ... (GPT-J). False: (c, c + rotary_dim / 2) (GPT-NeoX).
            ``flash_attn_with_kvcache`` has the opposite default, as in flash-attention.
        inplace: writes the result to ``x`` and returns ``x``. ``x`` may be a leaf that requires a gradient, as in
            flash-attention: the gradient belongs to its values before the rotation.
        seqlen_offsets: added to the positions, a number or (B).
        cu_seqlens: (B + 1) offsets of packed sequences: positions count from each sequence's start.
        max_seqlen: ignored.

    Returns:
        ``x``'s shape and dtype; differentiable.
    """
    check_is_dense("x", x)
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(
            f"x: got shape {list(x.shape)}; allowed: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) "
            "with cu_seqlens"
        )
    cos, sin = _rows_of_tables(cos, sin, x, seqlen_offsets, cu_seqlens)
    return _rotate_in_place(x, interleaved, [(..., cos, sin)]) if inplace else rotate(x, cos, sin, interleaved)


apply_rotary_emb_func = apply_rotary_emb  # flash-attention's older name


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k in ``qkv``, in place, and returns ``qkv``. v stays as it is.

    Args:
        qkv: (B, S, 3, H, D); or (B, S, num_heads_q + 2 * H_k, D): the heads of q, then of k, then of v.
        cos, sin: as in :func:`apply_rotary_emb`.
        cos_k, sin_k: other tables for k. None: the tables of q.
        interleaved, seqlen_offsets: as in :func:`apply_rotary_emb`.
        num_heads_q: needed for the second form of ``qkv``.
    """
    check_is_dense("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = (slice(None), slice(None), 0), (slice(None), slice(None), 1)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        end = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        q, k = (slice(None), slice(None), slice(num_heads_q)), (slice(None), slice(None), slice(num_heads_q, end))
    else:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)} and num_heads_q {num_heads_q}; allowed: (batch, seqlen, 3, heads, "
            "head_dim), or (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) with num_heads_q"
        )
    tables_of_q = _rows_of_tables(cos, sin, qkv, seqlen_offsets)
    tables_of_k = tables_of_q
    if cos_k is not None or sin_k is not None:
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        tables_of_k = _rows_of_tables(cos_k, sin_k, qkv, seqlen_offsets)
    return _rotate_in_place(qkv, interleaved, [(q, *tables_of_q), (k, *tables_of_k)])


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k in ``kv`` (B, S, 2, H_k, D), in place, and returns ``kv``. v stays as it is."""
    check_is_dense("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: got shape {list(kv.shape)}; allowed: (batch, seqlen, 2, heads_k, head_dim)")
    tables = _rows_of_tables(cos, sin, kv, seqlen_offsets)
    return _rotate_in_place(kv, interleaved, [((slice(None), slice(None), 0), *tables)])


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k in place. The module computes and caches the tables.

    Args:
        dim: the number of columns of each head that are rotated.
        base: pair c of row n is rotated by the angle ``n / base ** (2 c / dim)``.
        interleaved: as in :func:`apply_rotary_emb`.
        scale_base: not None: XPos (Sun et al. 2022, arXiv 2212.10554). Pair c of query n is multiplied by
            ``f = ((2 c + 0.4 dim) / (1.4 dim)) ** ((n - center) / scale_base)``, and pair c of key n is divided by f.
            ``center`` is half the length of the tables, as in flash-attention. With a cache of keys, pass
            ``max_seqlen``, so that ``center`` does not change.
        device: the device of the tables' frequencies.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        columns = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (columns + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        # Names of flash-attention, which models read.
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Makes tables of at least ``seqlen`` rows.

        Angles are always float32, even if the module was cast to another dtype.
        """
        table = self._cos_cached
        fits = table is not None and seqlen <= self._seq_len_cached and (table.device, table.dtype) == (device, dtype)
        if fits and not (self.training and table.is_inference()):  # inference tensors cannot be saved for a backward
            return
        self._seq_len_cached = seqlen
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        rows = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = rows[:, None] * inv_freq.to(rows.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self.scale.float().to(rows.device) ** ((rows[:, None] - seqlen // 2) / self.scale_base)
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: as in :func:`apply_rotary_emb_qkv_`; or, with ``kv``, only q, (B, S, H, D).
            kv: (B, S, 2, H_k, D).
            seqlen_offset: the position of the first row, a number or (B).
            max_seqlen: the number of rows that the tables must have. None: it is computed, which waits for the GPU if
                ``seqlen_offset`` is a CUDA tensor.
            num_heads_q: as in :func:`apply_rotary_emb_qkv_`.

        Returns:
            ``qkv``, or (q, ``kv``).
        """
        if max_seqlen is None:
            last = seqlen_offset
            if isinstance(last, Tensor):
                last = last.max().item() if last.numel() else 0
            max_seqlen = qkv.shape[1] + last
        self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        tables = self._cos_cached, self._sin_cached
        tables_of_k = tables if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        options = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *tables_of_k, num_heads_q=num_heads_q, **options)
        q = apply_rotary_emb(qkv, *tables, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, *tables_of_k, **options)
