"""The algorithms of the literature on one head, to be read: README.md in this folder is the way through them.

    memory.py, tile.py     the machine that counts: a slow memory and a small chip
    softmax.py             1. safe softmax in three passes, online softmax in two
    standard.py            2. attention as five kernels, and its backward by hand
    flash1.py              3. FlashAttention
    flash2.py              4. FlashAttention-2
    flash3_schedule.py     5. FlashAttention-3's pipelines on a model of the hardware (pipeline.py)
    flash_decoding.py      6. Flash-Decoding
    flash_decoding_pp.py   7. FlashDecoding++
    float8.py              8. FlashAttention-3's products in 8 bits

Nothing here is fast, and of the rest of the package only iomodel's commands use it.
"""
