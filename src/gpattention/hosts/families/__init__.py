"""Host families: one file each, an adapter of the protocol that `base.Family` documents.

A new family is a file here that defines its adapter, and its line below.  The first adapter that matches a
module is asked, so that narrower families stand before wider ones.
"""

from gpattention.hosts.families import huggingface, own, timm, torch
from gpattention.hosts.families.base import Family

_CLASSES = (torch.TorchFamily, huggingface.HuggingFaceFamily, timm.TimmFamily, own.OwnFamily)
FAMILIES: dict[str, Family] = {cls.name: cls() for cls in _CLASSES}
