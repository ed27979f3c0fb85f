"""vLLM on CPU: runs the attention of a served model on flash_attn_ext, chosen by vLLM's own option.

The package declares :func:`plugin.register` as a plugin of vLLM, so every process of vLLM calls it. Then vLLM lists the
backend ``FLASH_ATTN_EXT``. A model uses this backend only if the user chooses it::

    vllm serve MODEL --attention-backend FLASH_ATTN_EXT
    vllm.LLM(MODEL, attention_backend="FLASH_ATTN_EXT")

``plugin.py`` adds the name to vLLM, ``backend.py`` implements vLLM's classes. The other files do not import vLLM:
``cache_format.py`` describes the caches, ``packed_step.py`` one step of the scheduler, and ``layer.py`` makes the calls
of one layer.
"""

NAME = "FLASH_ATTN_EXT"
