"""flash_attn_ext in other libraries. flash_attn_ext does not import these modules: import the one that you use."""
