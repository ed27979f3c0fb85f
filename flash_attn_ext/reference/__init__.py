"""The algorithms of the literature on one head, written for readers. README.md in this folder explains them in order.

    memory.py, tile.py     the machine that counts: a slow memory and a small chip
    softmax.py             1. safe softmax in three passes, online softmax in two
    standard.py            2. attention as five kernels, and its backward by hand
    flash1.py              3. FlashAttention
    block_sparse.py        3. block-sparse FlashAttention
    flash2.py              4. FlashAttention-2
    flash3_schedule.py     5. FlashAttention-3's pipelines on a model of the hardware (pipeline.py)
    flash_decoding.py      6. Flash-Decoding
    flash_decoding_pp.py   7. FlashDecoding++
    float8.py              8. FlashAttention-3's products in 8 bits

These algorithms are not fast. In the rest of the package only the commands of iomodel use them.
"""
