"""FlopCounterMode's formulas for the indexer's operators. Every pair of a query and a key counts.

With chosen keys, every slot counts. The backward of the scores is three products: q k^T again, and the gradients of q
and of k. The loss also computes the main attention's query key^T.
"""

from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from .. import _ops


def _keys(given: dict) -> int:
    """The number of keys of each query; with pages, all rows of a sequence's pages."""
    k, indices, block_table = given["k"], given.get("indices"), given.get("block_table")
    if indices is not None:
        return indices.shape[-1]
    return k.shape[1] * (1 if block_table is None else block_table.shape[1])


def _register(op: OpOverload, index_products: int, main_products: int = 0) -> None:
    names = [argument.name for argument in op._schema.arguments]

    def flops(*args, out_val=None, **kwargs) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        batch, heads, queries, columns = given["q"].shape
        count = index_products * heads * columns
        if main_products:
            count += main_products * given["query"].shape[1] * given["query"].shape[3]
        return 2 * batch * queries * _keys(given) * count

    register_flop_formula(op.overloadpacket, get_raw=True)(flops)


_register(_ops.indexer_topk, 1)
_register(_ops.indexer_scores, 1)
_register(_ops.indexer_scores_backward, 3)
_register(_ops.indexer_loss, 1, 1)
_register(_ops.indexer_loss_backward, 3, 1)
