"""FlexAttention: functions of the user on scores and masks. docs/flex.md has a gallery."""

from .attention import flex_attention

__all__ = ["flex_attention"]
