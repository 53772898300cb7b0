"""The family attn_coopmat: prefill on matrix units by VK_KHR_cooperative_matrix, in half precision with float32 sums.

Which lane holds which element of a matrix is the driver's secret. The variants "quad" suppose that four lanes hold
whole rows, as on NVIDIA, and keep scores in registers; the variants "shared" suppose nothing. The self-test tells which
is right on a device.
"""

from __future__ import annotations

from . import matrix

NAME = "coopmat"
ONLY_BY_NAME_ON = matrix.ONLY_BY_NAME_ON

#: The axis `rows`, best first.
ENDINGS = ("_quad", "_shared")

_FAMILY = matrix.Family("attn_coopmat", ENDINGS)
candidates, untested, not_supported_reasons = _FAMILY.candidates, _FAMILY.untested, _FAMILY.not_supported_reasons
variants, passes, scratch_words, cut = _FAMILY.variants, _FAMILY.passes, _FAMILY.scratch_words, _FAMILY.cut
