"""The indexer of DeepSeek sparse attention: chooses each query's keys, and its training. See docs/indexer.md."""

from . import _autograd, _composite, _flops  # noqa: F401  register derivatives, the choice on CUDA, and FLOPs
from .loss import indexer_loss
from .scores import indexer_scores
from .topk import indexer_topk

__all__ = ["indexer_loss", "indexer_scores", "indexer_topk"]
