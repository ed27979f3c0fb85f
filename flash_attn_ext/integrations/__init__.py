"""flash_attn_ext in other libraries. flash_attn_ext does not import these modules: import the module that you use."""
