"""The cases that `make test` and `make test-quick` run of a test with several parameters.

They set FLASH_ATTN_EXT_TEST_PAIRS=1. Of a product of three or more parameters they run few cases, in which every pair
of values occurs: as a rule a fault depends on one parameter or two. pytest without the variable runs every case.
"""

import os
from itertools import combinations

ENABLED = os.environ.get("FLASH_ATTN_EXT_TEST_PAIRS") == "1"

# Tests with two parameters and many seconds, by file: every value occurs, and not every pair.
EACH_VALUE = {
    "test_integration": {"test_compile_fullgraph"},
    "test_cuda_host": {
        "test_all_options_together", "test_sink", "test_gradient", "test_head_dims", "test_splits",
        "test_large_finite_mask_values",
    },
    "test_cuda_sm80_backward": {
        "test_keys_that_no_query_sees", "test_each_gradient_alone", "test_all_options_together", "test_window",
        "test_grouped_queries", "test_dropout",
    },
    "test_cuda_sm90_backward": {
        "test_poison_reaches_exactly_the_rows_that_depend_on_it", "test_an_overflow_costs_next_to_nothing",
        "test_windows", "test_heads_and_batches", "test_orders_of_blocks_threads_and_copies",
    },
    "test_cuda_sm90_few_rows": {"test_packed_sequences", "test_heads_share_tiles"},
    "test_cuda_large_scores": {"test_gradients_of_peaked_rows"},
    "test_cuda_sm90_head_dims": {"test_poison_reaches_exactly_the_rows_that_depend_on_it"},
    "test_cuda_sm90": {"test_work_where_much_is_nan", "test_windows"},
    "test_cuda_sm90_options": {"test_softcap", "test_softcap_and_hidden_keys", "test_key_masks"},
    "test_cuda_sm80_decode": {"test_rows_of_several_heads_share_a_block"},
    "test_cuda_sm80_jvp": {"test_all_options_together", "test_head_dims"},
    "test_cuda_derivatives": {"test_head_dims", "test_tile_edges"},
    "test_cuda_sm80_flex": {"test_gradients"},
    "test_cuda_sm80_varlen": {"test_neighbours_never_enter_a_product"},
    "test_cuda_kvcache": {"test_int4_caches"},
    "test_cuda_indexer": {"test_loss_and_its_gradients"},
}  # fmt: skip


def chosen(items):
    """The test items that run, in their order."""
    groups = {}
    for item in items:
        groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    kept = {item.nodeid for group in groups.values() for item in cases(group)}
    return [item for item in items if item.nodeid in kept]


def cases(group):
    """The test items of one test that run."""
    rows = [values_of(item) for item in group]
    together = 1 if group[0].originalname in EACH_VALUE.get(group[0].path.stem, ()) else 2
    varied = [n for n, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
    if len(varied) <= together:
        return group
    return [group[n] for n in cover([[row[n] for n in varied] for row in rows], together)]


def values_of(item):
    """The values of an item's parameters. Names of one parametrize() are one parameter."""
    if not hasattr(item, "callspec"):
        return []
    params = dict(item.callspec.params)
    values = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        values.append(repr([params.pop(name, None) for name in names]))
    return [*values, *map(repr, params.values())]


def cover(rows, together):
    """Numbers of rows in which each combination of `together` columns' values occurs that occurs in any row. The next
    row is the first one with the most combinations that are still missing."""
    combined = [set(combinations(enumerate(row), together)) for row in rows]
    missing, taken = set().union(*combined), []
    while missing:
        best = max(range(len(rows)), key=lambda n: len(combined[n] & missing))
        missing -= combined[best]
        taken.append(best)
    return sorted(taken)
