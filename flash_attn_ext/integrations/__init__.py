"""flash_attn_ext in other libraries. Nothing here is imported by flash_attn_ext itself: import the one you use."""
