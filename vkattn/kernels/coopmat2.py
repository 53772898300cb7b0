"""The family attn_coopmat2: attn_coopmat with the softmax of VK_NV_cooperative_matrix2, in registers.

Its row reductions, functions of elements and conversions of a sum to an operand need no knowledge of which lane holds
what.
"""

from __future__ import annotations

from . import matrix

NAME = "coopmat2"
ONLY_BY_NAME_ON = matrix.ONLY_BY_NAME_ON

#: There is one variant to a size.
ENDINGS = ("",)

_FAMILY = matrix.Family("attn_coopmat2", ENDINGS)
candidates, untested, not_supported_reasons = _FAMILY.candidates, _FAMILY.untested, _FAMILY.not_supported_reasons
variants, passes, scratch_words, cut = _FAMILY.variants, _FAMILY.passes, _FAMILY.scratch_words, _FAMILY.cut
